"""The conversations that a router knows: which lease each one has, and how its turns went."""

from collections import OrderedDict

from kvlease.core.clock import Clock
from kvlease.core.conversation import ConversationIndex, Leaf, Reply, Transcript, conversation_key
from kvlease.core.ids import Holder
from kvlease.core.lease import MissReason
from kvlease.core.pauses import PauseModel, TurnEnd
from kvlease.core.recent import Recent
from kvlease.core.records import LeaseRecord
from kvlease.core.renewal import Belief, RenewalTable
from kvlease.core.signals import REASON_OF_MISS, LeaseSignal, PlanReason
from kvlease.router.bodies import TurnRequest
from kvlease.router.conversation import (
    Conversation,
    ConversationLease,
    OpenTurn,
    extends,
    key_of,
    model_of,
    shared_place,
)
from kvlease.router.engines import EngineTable
from kvlease.router.ports import RandomPort
from kvlease.store.port import Batch

LEAVES_MAX = 16
"""Leaves under one id that a client gave: sub-agents at work beside their parent, branches, best of several."""

GIVEN_UP_MAX = 10_000
"""Leases that gave way to others here, or were released, and are not found by their records, at least: those trail by
seconds."""


class ConversationTable:
    """Finds the conversation of a request, and keeps what its turns leave behind. Nothing in here waits."""

    def __init__(
        self,
        clock: Clock,
        renewals: RenewalTable,
        engines: EngineTable,
        random: RandomPort,
        conversations_max: int,
    ) -> None:
        self._clock = clock
        self._renewals = renewals
        self._engines = engines
        self._random = random
        self._conversations_max = conversations_max
        self._pauses = PauseModel()
        self._keeping = renewals.policy.keeping()
        self._conversations: OrderedDict[bytes, Conversation] = OrderedDict()
        self._index = ConversationIndex()
        self._records: dict[int, LeaseRecord] = {}
        self._record_of_key: dict[bytes, int] = {}
        self._record_of_leaf: dict[int, int] = {}
        self._given_up = Recent[int, bool](GIVEN_UP_MAX)

    def __len__(self) -> int:
        return len(self._conversations)

    @property
    def recorded_leases(self) -> int:
        """Leases that the registry's watch told of, those of other routers among them."""
        return len(self._records)

    def find(self, tenant: str, conversation_id: str) -> Conversation | None:
        """A conversation by its id: one that was led here, or elsewhere if its lease is recorded."""
        key = conversation_key(tenant, conversation_id)
        known = key in self._conversations or self._recorded(key, tenant) is not None
        return self._named(tenant, conversation_id) if known else None

    def leaves(self, conversation: Conversation) -> list[Conversation]:
        """Everything that goes under a conversation's id, the one used last in the end."""
        branches = (self._conversations.get(key) for key in conversation.branches)
        known = [conversation, *(branch for branch in branches if branch is not None)]
        return sorted(known, key=lambda leaf: leaf.used_s)

    # --- turns --------------------------------------------------------------------------------------------

    def open(self, request: TurnRequest) -> OpenTurn:
        """Finds or begins the conversation of a request. Ends with `close`."""
        turn = self._named_turn(request) if request.conversation_id else self._unnamed_turn(request)
        conversation = turn.conversation
        conversation.used_s = self._clock.now_s()
        self._end_pause(conversation)
        conversation.open_turns += 1
        if turn.claims:
            conversation.claim = key_of(request.transcript)
        if turn.base is not None:
            self._renewals.open(turn.base.lease_id)
        self._trim()
        return turn

    def lease_signal(self, turn: OpenTurn) -> LeaseSignal | PlanReason:
        """What the planner may know of the lease that a turn could reuse."""
        base = turn.base
        if base is None:
            return PlanReason.FIRST_TURN if turn.first else PlanReason.LEASE_MISSING
        if base.model not in ("", turn.model):
            return PlanReason.MODEL_CHANGED
        if not self._engines.holds(base.holder):
            return PlanReason.LEASE_LOST
        if not self._engines.serves(base.holder, turn.model):
            return PlanReason.MODEL_CHANGED
        belief = self._renewals.belief(self._clock.now_s(), base.lease_id)
        if belief is Belief.MISSED:
            return REASON_OF_MISS[self._renewals.miss(base.lease_id)]
        if belief is Belief.EXPIRED:
            return PlanReason.LEASE_EXPIRED
        suffix = turn.suffix_bytes
        suffix_tokens = None if suffix is None else turn.conversation.estimate.tokens(suffix)
        return LeaseSignal(base.holder.engine_id, suffix_tokens, base.tokens)

    def grant(
        self, turn: OpenTurn, lease_id: int, holder: Holder, reply: Reply, *, awaits_tools: bool = False
    ) -> ConversationLease | None:
        """A turn ended well: its lease is the conversation's. Returns the lease to release by name, if any.

        The holder supersedes the lease that the turn was told to; whatever else the conversation had is left
        to us.
        """
        conversation = turn.conversation
        leaf = self._remember_end(turn, reply, awaits_tools)
        previous = conversation.lease
        conversation.lease = ConversationLease(
            lease_id, holder, turn.model, leaf, traceparent=turn.traceparent
        )
        self._renewals.expect(self._clock.now_s(), lease_id, holder.engine_id)
        if previous is None:
            return None
        self._give_up(previous.lease_id)
        superseded = previous.lease_id == turn.supersedes and previous.holder.engine_id == holder.engine_id
        return None if superseded else previous

    def finish_without_lease(self, turn: OpenTurn, reply: Reply, *, awaits_tools: bool = False) -> None:
        """A turn ended well on an engine that retains nothing."""
        self._remember_end(turn, reply, awaits_tools)

    def learn(self, turn: OpenTurn, lease_id: int, prompt_tokens: int, completion_tokens: int) -> None:
        """Takes the counts of a turn that ended well."""
        conversation = turn.conversation
        turn.prompt_tokens, turn.reply_tokens = prompt_tokens, completion_tokens
        text_bytes = turn.transcript.text_bytes if turn.transcript else 0
        conversation.estimate = conversation.estimate.learnt(prompt_tokens, text_bytes)
        lease = conversation.lease
        if lease is not None and lease.lease_id == lease_id and prompt_tokens:
            tokens = prompt_tokens + completion_tokens
            conversation.lease = lease.of_tokens(tokens)

    def close(self, turn: OpenTurn) -> None:
        """The turn is over, however it ended."""
        now_s = self._clock.now_s()
        turn.conversation.open_turns -= 1
        turn.conversation.used_s = now_s
        if turn.claims:
            turn.conversation.claim = None
        if turn.ended:
            self._begin_pause(turn)
        live_s = self._live_s(turn.conversation)
        if turn.base is not None:
            self._renewals.close(now_s, turn.base.lease_id, live_s)
        lease = turn.conversation.lease
        if turn.ended and lease is not None:
            self._renewals.keep_live(now_s, lease.lease_id, live_s)

    def keep_live(self, conversation: Conversation, duration_s: float) -> bool:
        """A client asks to keep the conversation. False when there is no lease to keep.

        The caller wakes the heartbeat: a lease that was let go may have little time left at its holder.
        """
        lease = conversation.lease
        now_s = self._clock.now_s()
        return lease is not None and self._renewals.keep_live(now_s, lease.lease_id, duration_s)

    def keep_all_live(self, conversation: Conversation, duration_s: float) -> bool:
        """The same for all that goes under the conversation's id. False when none of it has a lease to keep."""
        kept = [self.keep_live(leaf, duration_s) for leaf in self.leaves(conversation)]
        return any(kept)

    def release(self, conversation: Conversation) -> ConversationLease | None:
        """Forgets the conversation's lease; the lease to release at its holder."""
        lease, conversation.lease = conversation.lease, None
        if lease is not None:
            self._give_up(lease.lease_id)
        return lease

    def release_tenant(self, tenant: str) -> list[tuple[int, str]]:
        """Forgets the leases of a tenant: ids and engine ids of those to release at their holders."""
        engine_of = {
            record.lease_id: record.holder.engine_id
            for record in self._records.values()
            if record.tenant == tenant
        }
        for lease_id in engine_of:
            self._give_up(lease_id)
        for conversation in self._conversations.values():
            lease = self.release(conversation) if conversation.tenant == tenant else None
            if lease is not None:
                engine_of[lease.lease_id] = lease.holder.engine_id
        return list(engine_of.items())

    def belief(self, conversation: Conversation) -> str:
        """What is believed of the conversation's lease: a `Belief` value, a miss, or `none`."""
        if conversation.lease is None:
            return "none"
        lease_id = conversation.lease.lease_id
        belief = self._renewals.belief(self._clock.now_s(), lease_id)
        return self._renewals.miss(lease_id).value if belief is Belief.MISSED else belief.value

    # --- records of other routers' leases -----------------------------------------------------------------

    def apply(self, batch: Batch[LeaseRecord]) -> None:
        """Takes what the watch tells of leases.

        A record that is absent from a snapshot proves nothing, since records trail their leases; one that is
        said to be gone has ended, and one of a lease that was given up here is about to go.
        """
        if batch.snapshot:
            self._records.clear()
            self._record_of_key.clear()
            self._record_of_leaf.clear()
        for change in batch.changes:
            record = change.item
            if change.gone:
                self._forget_record(record)
                continue
            self._renewals.revive(self._clock.now_s(), record.lease_id)
            self._records[record.lease_id] = record
            if not self._given_up.get(record.lease_id):
                self._record_of_key[record.conversation_key] = record.lease_id
                if record.chain_keys:
                    self._record_of_leaf[record.chain_keys[-1]] = record.lease_id

    def _forget_record(self, gone: LeaseRecord) -> None:
        if self._is_live(gone.lease_id):
            # A lease whose end was understood before keeps its reason: the record follows.
            self._renewals.lose(gone.lease_id, MissReason.UNKNOWN)
        self._lead_away(gone.lease_id)
        self._records.pop(gone.lease_id, None)

    def _give_up(self, lease_id: int) -> None:
        self._renewals.drop(lease_id)
        self._given_up.put(lease_id, True)
        self._lead_away(lease_id)

    def _lead_away(self, lease_id: int) -> None:
        """No request is led to a lease by its record any more."""
        record = self._records.get(lease_id)
        if record is None:
            return
        if self._record_of_key.get(record.conversation_key) == lease_id:
            del self._record_of_key[record.conversation_key]
        if record.chain_keys and self._record_of_leaf.get(record.chain_keys[-1]) == lease_id:
            del self._record_of_leaf[record.chain_keys[-1]]

    def _has_live_lease(self, conversation: Conversation) -> bool:
        return conversation.lease is not None and self._is_live(conversation.lease.lease_id)

    def _is_live(self, lease_id: int) -> bool:
        return self._renewals.belief(self._clock.now_s(), lease_id) in (Belief.HELD, Belief.PENDING)

    def _adopt(self, record: LeaseRecord) -> ConversationLease:
        """Takes over a lease that another router granted; nothing is believed of it before an ack.

        One that is believed in already, as of another branch, goes on with its turns in flight.
        """
        if not self._is_live(record.lease_id):
            self._renewals.expect(self._clock.now_s(), record.lease_id, record.holder.engine_id)
        leaf = Leaf(record.chain_keys)
        return ConversationLease(record.lease_id, record.holder, "", leaf, record.tokens)

    # --- inside -------------------------------------------------------------------------------------------

    def _named(self, tenant: str, conversation_id: str) -> Conversation:
        """A conversation by its id, with the lease that another router recorded where ours is none any more."""
        key = conversation_key(tenant, conversation_id)
        conversation = self._get(key) or self._insert(Conversation(key, tenant, conversation_id, named=True))
        record = self._recorded(key, tenant)
        if record is not None and not self._has_live_lease(conversation):
            conversation.lease = self._adopt(record)
            conversation.decode_engine_id = record.holder.engine_id
        return conversation

    def _recorded(self, key: bytes, tenant: str) -> LeaseRecord | None:
        record = self._records.get(self._record_of_key.get(key, 0))
        return record if record is not None and record.tenant == tenant else None

    def _named_turn(self, request: TurnRequest) -> OpenTurn:
        conversation = self._named(request.tenant, request.conversation_id)
        transcript = request.transcript
        begun = conversation.leaf or conversation.lease or conversation.claim is not None
        if transcript is None:
            return self._continue(request, conversation)
        return (
            self._leaf_turn(request, transcript, conversation)
            if begun
            else self._claim(request, conversation)
        )

    def _leaf_turn(self, request: TurnRequest, transcript: Transcript, named: Conversation) -> OpenTurn:
        """What a request goes on with under an id: of its leaves the one that shares the longest prefix.

        A request that extends a leaf, asks for its reply once more, or repeats what is in flight, goes on there.
        Any other one gets a leaf of its own, which reads what it shares and supersedes nothing: so agents at work
        under one id keep their leases. What begins anew shares nothing. A history that is not known (a window
        that slid on) takes the place of the leaf used last.
        """
        leaves = self.leaves(named)
        places = {key: place for place, key in enumerate(transcript.keys)}
        leaf = max(leaves, key=lambda one: (shared_place(places, one), one.used_s))
        if shared_place(places, leaf) >= 0:
            if leaf.claim is not None:
                repeated = leaf.claim == transcript.key
                return self._continue(request, leaf) if repeated else self._branch(request, named, leaf)
            if extends(transcript, leaf):
                return self._claim(request, leaf)
            return self._branch(request, named, leaf)
        if not transcript.replies and transcript.prompt is None:
            return self._branch(request, named, None)
        idle = [one for one in leaves if one.claim is None and model_of(one) in ("", request.model)]
        return self._claim(request, idle[-1]) if idle else self._branch(request, named, leaves[-1])

    def _unnamed_turn(self, request: TurnRequest) -> OpenTurn:
        found = self._index.find(request.transcript) if request.transcript is not None else None
        owner = self._get(found.owner) if found is not None else None
        if found is None or owner is None:
            recorded = self._recorded_turn(request)
            return recorded or OpenTurn(self._mint(request), request.transcript, request.model)
        at_leaf = owner.leaf is not None and owner.leaf.key == found.leaf.key
        if found.extends and at_leaf and owner.claim is None:
            return self._claim(request, owner)
        return self._fork(request, owner, found.leaf)

    def _recorded_turn(self, request: TurnRequest) -> OpenTurn | None:
        """A branch of another router's conversation.

        The record ends before the reply, so runs that begin alike cannot be told apart: the branch reads, and
        supersedes nothing.
        """
        transcript = request.transcript
        if transcript is None or transcript.prompt is not None:
            return None
        for key in reversed(transcript.keys[:-1]):
            record = self._records.get(self._record_of_leaf.get(key, 0))
            if record is not None and record.tenant == request.tenant:
                branch = self._mint(request)
                base = self._adopt(record)
                branch.decode_engine_id = record.holder.engine_id
                suffix_bytes = transcript.suffix_bytes(base.leaf)
                return OpenTurn(branch, transcript, request.model, base, suffix_bytes, first=False)
        return None

    def _continue(self, request: TurnRequest, conversation: Conversation) -> OpenTurn:
        lease, transcript = conversation.lease, request.transcript
        return OpenTurn(
            conversation,
            transcript,
            request.model,
            base=lease,
            suffix_bytes=transcript.suffix_bytes(lease.leaf) if lease and transcript else None,
            supersedes=lease.lease_id if lease else 0,
            first=not conversation.turns and lease is None,
        )

    def _claim(self, request: TurnRequest, conversation: Conversation) -> OpenTurn:
        """Goes on from a leaf, so that another request that does is a branch."""
        turn = self._continue(request, conversation)
        turn.claims = True
        return turn

    def _fork(self, request: TurnRequest, owner: Conversation, leaf: Leaf) -> OpenTurn:
        """A branch: another conversation that may read the lease of the one it leaves."""
        return self._read_from(request, self._mint(request), owner, leaf)

    def _branch(self, request: TurnRequest, named: Conversation, owner: Conversation | None) -> OpenTurn:
        """Another leaf under a client's id, which may read the lease of the leaf it leaves."""
        key = conversation_key(request.tenant, self._random.text_id())
        branch = Conversation(key, named.tenant, named.conversation_id, named=True, turns=named.turns)
        self._insert(branch)
        named.branches = [*(leaf.key for leaf in self.leaves(named) if leaf is not named), key]
        while len(named.branches) >= LEAVES_MAX:
            named.branches.pop(0)
        if owner is None:
            turn = OpenTurn(branch, request.transcript, request.model)
        else:
            turn = self._read_from(request, branch, owner, owner.leaf or Leaf(()))
        turn.claims = True
        return turn

    def _read_from(
        self, request: TurnRequest, branch: Conversation, owner: Conversation, leaf: Leaf
    ) -> OpenTurn:
        branch.estimate = owner.estimate
        branch.last_gap_s = owner.last_gap_s
        branch.decode_engine_id = owner.decode_engine_id
        suffix_bytes = request.transcript.suffix_bytes(leaf) if request.transcript else None
        return OpenTurn(
            branch,
            request.transcript,
            request.model,
            base=owner.lease,
            suffix_bytes=suffix_bytes,
            first=False,
        )

    def _mint(self, request: TurnRequest) -> Conversation:
        conversation_id = self._random.text_id()
        key = conversation_key(request.tenant, conversation_id)
        return self._insert(Conversation(key, request.tenant, conversation_id, named=False))

    def _end_pause(self, conversation: Conversation) -> None:
        """A turn begins. Tools take as long as they take: that says nothing of the next pause."""
        since_s, conversation.idle_since_s = conversation.idle_since_s, None
        if since_s is None or conversation.awaits_tools:
            return
        now_s = self._clock.now_s()
        conversation.last_gap_s = max(0.0, now_s - since_s)
        self._pauses.went_on(now_s, conversation.key)

    def _begin_pause(self, turn: OpenTurn) -> None:
        """A turn has ended well: how long the next one is waited for, and what there is to learn from it."""
        conversation = turn.conversation
        end = _turn_end(turn)
        if conversation.idle_since_s is not None and not conversation.awaits_tools:
            self._pauses.begin(self._clock.now_s(), conversation.key, end)
        conversation.keep_s = self._pauses.keep_s(end, self._keeping)

    def _live_s(self, conversation: Conversation) -> float:
        """For how long the conversation is kept without another turn."""
        if conversation.awaits_tools:
            return max(conversation.keep_s, self._renewals.policy.tool_call_max_s)
        return conversation.keep_s

    def _remember_end(self, turn: OpenTurn, reply: Reply, awaits_tools: bool) -> Leaf:
        turn.ended = True
        turn.conversation.idle_since_s = self._clock.now_s()
        turn.conversation.awaits_tools = awaits_tools
        leaf = turn.transcript.leaf(reply) if turn.transcript is not None else Leaf(())
        turn.conversation.leaf = leaf
        if leaf.key and not turn.conversation.named:
            self._index.put(turn.conversation.key, leaf)
        if turn.claims:
            # The next turn may come before this one has closed.
            turn.conversation.claim = None
            turn.claims = False
        return leaf

    def _get(self, key: bytes) -> Conversation | None:
        conversation = self._conversations.get(key)
        if conversation is not None:
            self._conversations.move_to_end(key)
        return conversation

    def _insert(self, conversation: Conversation) -> Conversation:
        self._conversations[conversation.key] = conversation
        return conversation

    def _trim(self) -> None:
        """Forgets the conversations used longest ago; what they hold expires by itself."""
        while len(self._conversations) > self._conversations_max:
            idle = (key for key, conversation in self._conversations.items() if not conversation.open_turns)
            oldest = next(idle, None)
            if oldest is None:
                return
            del self._conversations[oldest]


def _turn_end(turn: OpenTurn) -> TurnEnd:
    """What is known of a turn that has ended: its request tells the turns that other routers served, too."""
    conversation = turn.conversation
    replies = turn.transcript.replies if turn.transcript is not None else 0
    new_tokens = turn.prompt_tokens
    if turn.suffix_bytes is not None:
        new_tokens = min(new_tokens, conversation.estimate.tokens(turn.suffix_bytes))
    return TurnEnd(
        tenant=conversation.tenant,
        turns=max(replies, len(conversation.turns) - 1),
        prompt_tokens=turn.prompt_tokens,
        new_tokens=new_tokens,
        reply_tokens=turn.reply_tokens,
        last_gap_s=conversation.last_gap_s,
    )
