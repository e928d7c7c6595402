"""Names of spans and keys of their attributes, as collectors and queries see them.

Own keys begin with `kvlease.`; where OpenTelemetry's semantic conventions (0.66b2) have a key it is theirs. The
values are counts, enums and single ids: never prompt text, block ids, digests, tenants or credentials.
"""

# --- spans ----------------------------------------------------------------------------------------------------

TURN = "kvlease.turn"
PLAN = "kvlease.plan"
PREFILL = "kvlease.prefill"
DECODE = "kvlease.decode"
LEASE_PIN = "kvlease.lease.pin"
LEASE_UNPIN = "kvlease.lease.unpin"
LEASE_RELEASE = "kvlease.lease.release"
HOLDER_PIN = "kvlease.holder.pin"
READ = "kvlease.read"
VERIFY = "kvlease.verify"
LLM_REQUEST = "llm_request"
"""vLLM's own span of a request; the simulated engine has one of that name."""

# --- own keys -------------------------------------------------------------------------------------------------

PATH = "kvlease.path"
REASON = "kvlease.reason"
ENDED = "kvlease.ended"
PIN_OUTCOME = "kvlease.pin.outcome"
"""`pinned`, or why not: a `MissReason` value."""

READ_OUTCOME = "kvlease.read.outcome"
"""What a turn's report says of its READ: see `TurnReport.outcome`."""

READ_TOKENS = "kvlease.read.tokens"
READ_BLOCKS = "kvlease.read.blocks"
READ_BYTES = "kvlease.read.bytes"
VERIFIED_TOKENS = "kvlease.verified.tokens"
LOCAL_TOKENS = "kvlease.local.tokens"
LEASE_ID = "kvlease.lease.id"
LEASE_KIND = "kvlease.lease.kind"
LEASE_TOKENS = "kvlease.lease.tokens"
HOLDER_ENGINE_ID = "kvlease.holder.engine_id"
PREFILL_ENGINE_ID = "kvlease.prefill.engine_id"
DECODE_ENGINE_ID = "kvlease.decode.engine_id"
LINK = "kvlease.link"
"""On a link: what the other span is to this one."""

GRANTED_BY = "granted_by"
"""Value of `LINK`: the turn that granted the lease which this turn may reuse."""

# --- semantic conventions -------------------------------------------------------------------------------------

GEN_AI_CONVERSATION_ID = "gen_ai.conversation.id"
GEN_AI_OPERATION_NAME = "gen_ai.operation.name"
GEN_AI_PROVIDER_NAME = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL = "gen_ai.request.model"
GEN_AI_REQUEST_STREAM = "gen_ai.request.stream"
GEN_AI_REQUEST_CHOICE_COUNT = "gen_ai.request.choice.count"
GEN_AI_INPUT_TOKENS = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
GEN_AI_CACHE_READ_TOKENS = "gen_ai.usage.cache_read.input_tokens"
GEN_AI_TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
"""Seconds."""

RPC_SYSTEM = "rpc.system.name"
RPC_METHOD = "rpc.method"
RPC_STATUS = "rpc.response.status_code"
HTTP_METHOD = "http.request.method"
HTTP_STATUS = "http.response.status_code"
URL_PATH = "url.path"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"
ERROR_TYPE = "error.type"
SERVICE_NAME = "service.name"
SERVICE_NAMESPACE = "service.namespace"
SERVICE_VERSION = "service.version"
SERVICE_INSTANCE_ID = "service.instance.id"
