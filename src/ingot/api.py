"""What can be done with a trained model from Python: load, generate. `train` is a door, in doors/python.py."""

from __future__ import annotations

from pathlib import Path

from ingot.generate.sampling import Sampling
from ingot.trained.model import LoadedModel, find_tokenizer, open_model
from ingot.trained.weights import open_weights


def load(
    path: str | Path,
    *,
    which: str = "latest",
    device: str = "auto",
    tokenizer: str | None = None,
    data: str | None = None,
    dtype: str | None = None,
) -> LoadedModel:
    """Load a run folder (its latest or best checkpoint), one checkpoint, or an artifact; to write with, as another `dtype`.

    An artifact that was exported without its tokenizer takes it from `tokenizer`, a name or file, or from the folder `data`.
    """
    weights = open_weights(Path(path), which)
    return open_model(weights, find_tokenizer(weights, tokenizer, data), device, dtype)


def generate(
    path: str | Path,
    prompt: str = "",
    *,
    which: str = "latest",
    device: str = "auto",
    tokens: int = 200,
    temperature: float = Sampling.temperature,
    top_k: int | None = Sampling.top_k,
    top_p: float | None = Sampling.top_p,
    seed: int | None = Sampling.seed,
    use_cache: bool = Sampling.use_cache,
    repetition_penalty: float = Sampling.repetition_penalty,
    stop_at_end: bool = False,
) -> str:
    """Load a model and let it continue a prompt."""
    return load(path, which=which, device=device).generate(
        prompt,
        tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        use_cache=use_cache,
        repetition_penalty=repetition_penalty,
        stop_at_end=stop_at_end,
    )
