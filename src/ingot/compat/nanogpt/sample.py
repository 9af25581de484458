"""sample.py: generate text as nanoGPT does, with all completions in one batch.

Each prompt is printed with its completion, followed by a line of dashes.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from ingot.compat.nanogpt.keys import PRECISIONS, Arguments, enter
from ingot.console.entry import say, warn
from ingot.console.output import for_reader
from ingot.errors import DataError
from ingot.runtime.files import readable

if TYPE_CHECKING:
    from ingot.data.tokenizers import Tokenizer

FILE = "FILE:"


def sample(arguments: Arguments) -> None:
    """Generate completions of the prompt and print them."""
    from ingot.backends.sampling import Sampling
    from ingot.backends.torch.generate import write_texts
    from ingot.backends.torch.inference import TorchInference
    from ingot.compat.nanogpt.checkpoint import count_parameters, open_named
    from ingot.compat.nanogpt.keys import device_named
    from ingot.console.progress import progress_bar

    values = arguments.values
    prompt = values["start"]
    if prompt.startswith(FILE):
        path = Path(prompt.removeprefix(FILE))
        with readable(path, DataError):
            prompt = path.read_text(encoding="utf-8-sig")  # some editors write a byte order mark
    device = device_named(values["device"], "sample.py")
    loaded = open_named(values["init_from"], Path(values["out_dir"]), str(device), say, warn)
    backend, tokenizer = loaded.backend, loaded.tokenizer
    assert isinstance(backend, TorchInference)
    say(f"number of parameters: {count_parameters(backend.model) / 1e6:.2f}M")
    if device.kind == "cuda":
        backend.cast(device.precision(PRECISIONS[values["dtype"]] if values["dtype"] else "auto"))
    elif values["dtype"] not in (None, "float32"):
        warn(f"dtype={values['dtype']} needs a CUDA GPU; computing in float32")

    with progress_bar("generating") as progress:
        completions = list(
            write_texts(
                backend.model,
                encode_prompt(tokenizer, prompt),
                values["num_samples"],
                values["max_new_tokens"],
                Sampling(values["temperature"], values["top_k"] or 0, seed=values["seed"]),
                progress,
                vocab_size=tokenizer.vocab_size,
                keep_half=True,
                record=True,
            )
        )
    for ids in completions:
        print(for_reader(prompt + decode_ids(tokenizer, ids, at_start=not prompt)))
        say("-" * 15)


main = partial(enter, "sample.py", sample)


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Encode a prompt to at least one token. GPT-2's tokenizer encodes <|endoftext|> as one token, as in nanoGPT."""
    from ingot.backends.sampling import prompt_ids
    from ingot.data.tokenizers.gpt2_bpe import END_OF_TEXT

    first, *others = prompt.split(END_OF_TEXT) if tokenizer.kind == "gpt2" else [prompt]
    ids = tokenizer.encode(first).tolist()
    for part in others:
        ids += [tokenizer.bos, *tokenizer.encode(part).tolist()]
    return ids or prompt_ids(tokenizer, "")


def decode_ids(tokenizer: Tokenizer, ids: list[int], at_start: bool) -> str:
    """Decode tokens to text, keeping GPT-2's <|endoftext|> as nanoGPT does; `at_start` is True if no text precedes the tokens."""
    from ingot.data.tokenizers.gpt2_bpe import END_OF_TEXT

    ends = [place for place, i in enumerate(ids) if tokenizer.kind == "gpt2" and i == tokenizer.bos]
    parts = [ids[before + 1 : end] for before, end in pairwise([-1, *ends, len(ids)])]
    return END_OF_TEXT.join(tokenizer.decode_bytes(part, at_start).decode("utf-8", "replace") for part in parts)
