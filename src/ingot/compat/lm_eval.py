"""lm-eval's model class for Ingot (extra `lm-eval`): importing this module registers it under the name `ingot`.

    import lm_eval, ingot.compat.lm_eval
    lm_eval.simple_evaluate(model="ingot", model_args="path=RUN,device=cpu", tasks=["hellaswag"])

Text is tokenized exactly as lm-eval's Hugging Face backend does for the exported model, so both backends give the same scores.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ingot.api import load
from ingot.artifact.hf_tokenizer import marks_texts
from ingot.backends.sampling import GenerationOptions, Sampling
from ingot.data.store.documents import marks_of
from ingot.errors import ConfigError
from ingot.inference.scoring import score_rows, text_ids

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError:
    raise ConfigError("ingot.compat.lm_eval needs the package lm-eval", advice="pip install 'ingot-lm[lm-eval]'") from None

MOST_NEW = 256  # maximum number of generated tokens if the task sets no limit


@register_model("ingot")
class IngotLM(TemplateLM):
    """An lm-eval model that loads a run folder, checkpoint or artifact."""

    def __init__(
        self, path: str, which: str = "latest", device: str | None = "auto", tokenizer: str | None = None, **ignored: Any
    ) -> None:
        super().__init__()
        self.model = load(Path(path), which=which, device=device or "auto", tokenizer=tokenizer)

    @property
    def eot_token_id(self) -> int:
        """Return the id of the end-of-text token."""
        if (mark := marks_of(self.model.tokenizer).eos) is None:
            raise ConfigError(f"the {self.model.tokenizer.kind} tokenizer has no end-of-text token, which lm-eval needs")
        return mark

    @property
    def prefix_token_id(self) -> int:
        """Return the id of the token that lm-eval prepends to a text without context."""
        return self.eot_token_id if self.model.tokenizer.bos is None else self.model.tokenizer.bos

    @property
    def max_length(self) -> int:
        """Return the context length."""
        return self.model.context

    @property
    def tokenizer_name(self) -> str:
        """Return a name for the tokenizer, which lm-eval uses as a cache key."""
        return self.model.tokenizer.fingerprint()

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **ignored: Any) -> list[int]:
        """Return the token ids of a text."""
        if add_special_tokens is None:
            return text_ids(self.model.tokenizer, string)
        found = self.model.tokenizer.encode_document(string) if add_special_tokens else self.model.tokenizer.encode(string)
        return [int(i) for i in found]

    def _loglikelihood_tokens(self, requests: Any, **ignored: Any) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether greedy decoding would produce it."""
        rows = [(before + after)[-(self.max_length + 1) :] for _, before, after in requests]
        firsts = [max(1, len(row) - len(after)) for row, (_, _, after) in zip(rows, requests, strict=True)]
        scores = score_rows(self.model.backend, rows, firsts)
        return [(one.total, one.is_greedy(row[one.first :])) for one, row in zip(scores, rows, strict=True)]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each whole text, computed in windows of the context length."""
        found = []
        for request in requests:
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1)
            parts = [(None, *make_disjoint_window(window)) for window in windows]
            found.append(sum(log for log, _ in self._loglikelihood_tokens(parts)))
        return found

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Return a completion of each prompt, greedy unless the task samples, truncated at the task's stop strings."""
        return [self._write(*request.args) for request in requests]

    def _write(self, context: str, asked: dict[str, Any]) -> str:
        stops = asked.get("until") or []
        stops = [stops] if isinstance(stops, str) else stops
        text = ""
        options = GenerationOptions(
            max_new_tokens=int(asked.get("max_gen_toks", asked.get("max_tokens", MOST_NEW))),
            temperature=float(asked.get("temperature") or 0.0) if asked.get("do_sample") else 0.0,
            seed=Sampling.seed,
            start_mark=marks_texts(self.model.tokenizer),  # prepend the start token exactly as in scoring
        )
        for _, piece in self.model.stream_batch([context], options):
            text += piece
            if places := [text.find(stop) for stop in stops if stop and stop in text]:
                return text[: min(places)]
        return text
