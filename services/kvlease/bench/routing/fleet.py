"""What the simulated engines can do.

Rates were measured on two H200 with the shape of Qwen3-32B, one prefill and one decode engine of vLLM 0.26 over NVLink:

| prompt | recompute | readback of all but 128 tokens | append of 128 tokens |
|---|---|---|---|
| 2,300 | 343 ms | 175 ms | |
| 4,400 | 605 ms | 172 ms | |
| 8,400 | 1,055 ms | 213 to 244 ms | 100 ms |
| 12,500 | 1,623 ms | 266 ms | |

Recompute is a line of 54 ms and 125.5 us a token; a READ of 8,192 tokens took 123 to 135 ms, 15.7 us a token, which is
16.6 GB/s; readback is then 54 ms, the READ and 128 computed tokens, as measured at 12,500; append is 84 ms and 128
computed tokens. What a step of decoding takes was not measured: it follows from the bytes that the step reads.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fleet:
    """Prefill and decode engines, all alike.

    Attributes:
        prefill_token_s: to compute a token of a prompt, on either kind of engine.
        read_token_s: to READ the KV of a token; an engine does one READ at a time as source, and one as sink.
        handover_fixed_s: of a turn's time to the first token, what is neither computing nor reading; other turns are
            not held up meanwhile.
        append_fixed_s: likewise when the decode engine computes the prompt.
        step_s: a step of decoding without its KV: 65 GB of weights at 4.3 TB/s.
        step_token_s: what each token of KV in the batch adds: 256 KiB at 3.4 TB/s.
        kv_tokens: that fit into one engine: 0.9 of 141 GB without the weights, at 256 KiB a token.
        retained_share: of them, what leases may occupy.
    """

    prefills: int = 8
    decodes: int = 8
    prefill_token_s: float = 125.5e-6
    read_token_s: float = 15.7e-6
    handover_fixed_s: float = 0.054
    append_fixed_s: float = 0.084
    step_s: float = 0.015
    step_token_s: float = 7.7e-8
    kv_tokens: int = 228_000
    retained_share: float = 0.5

    @property
    def prompt_tokens_per_s(self) -> float:
        """The fleet's capacity: prompts that its prefill engines compute when nothing is reused."""
        return self.prefills / self.prefill_token_s
