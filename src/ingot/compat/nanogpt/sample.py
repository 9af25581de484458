"""sample.py: let a model write, as nanoGPT does, with all texts side by side.

What is printed is the start, what follows it, and a line of dashes after each text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.compat.nanogpt.command_line import Given, enter
from ingot.compat.nanogpt.keys import PRECISIONS
from ingot.console.entry import say, warn
from ingot.console.output import for_reader
from ingot.errors import ConfigError, DataError
from ingot.runtime.files import readable

if TYPE_CHECKING:
    from ingot.backends.torch.inference import TorchInference
    from ingot.data.tokenizers import Tokenizer
    from ingot.inference.model import LoadedModel
    from ingot.runtime.devices import Device

DASHES = "-" * 15
FILE = "FILE:"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run sample.py; returns the exit code."""
    return enter("sample.py", sample, arguments)


def sample(given: Given) -> None:
    """Write as the keys say."""
    from ingot.compat.nanogpt.initial import open_named

    values = given.values
    check(values)
    start = read_start(str(values["start"]))
    device, precision = _machine(str(values["device"]), values["dtype"])
    loaded = open_named(str(values["init_from"]), Path(str(values["out_dir"])), str(device), say, warn)
    counted = (p for name, p in _backend(loaded).model.named_parameters() if name != "transformer.wpe.weight")  # as nanoGPT does
    say(f"number of parameters: {sum(p.numel() for p in counted) / 1e6:.2f}M")
    if values["compile"]:
        warn("compile=True changes nothing here: on a GPU steps are recorded and replayed as they are")
    if not start:
        warn("start is empty: the texts begin as a document does, or with a newline where the tokenizer marks no beginning")
    for text in texts(loaded, start, values, precision):
        print(for_reader(text))
        say(DASHES)


def texts(loaded: LoadedModel, start: str, values: Mapping[str, Any], precision: str) -> Iterator[str]:
    """The start and what a model writes after it, num_samples times."""
    from ingot.backends.sampling import Sampling
    from ingot.backends.torch.generate import write_texts
    from ingot.console.progress import progress_bar

    backend, tokenizer, stop = _backend(loaded), loaded.tokenizer, values["stop"]
    backend.cast(precision)
    sampling = Sampling(values["temperature"], values["top_k"] or 0, values["top_p"], values["seed"])
    ids = start_ids(tokenizer, start)

    def shown(found: list[int]) -> str:
        text = text_of(tokenizer, found, at_start=not start)
        place = text.find(stop) if stop is not None else -1
        return text if place < 0 else text[: place + len(stop)]

    def ended(found: list[int]) -> bool:
        return str(stop) in text_of(tokenizer, found, at_start=not start)

    with progress_bar("writing") as progress:
        written = list(
            write_texts(
                backend.model,
                ids,
                values["num_samples"],
                values["max_new_tokens"],
                sampling,
                ended if stop is not None else None,
                progress,
                vocab_size=tokenizer.vocab_size,
                keep_half=True,
                record=True,
            )
        )
    return (start + shown(found) for found in written)


def check(values: Mapping[str, Any]) -> None:
    """Refuse what cannot be."""
    from ingot.backends.sampling import MOST_TOKENS

    for name in ("num_samples", "max_new_tokens", "temperature", "top_k", "seed"):
        if values[name] is not None and values[name] < 0:
            raise ConfigError(f"{name}={values[name]} must be 0 or more")
    for name, most in (("num_samples", 10**6), ("max_new_tokens", MOST_TOKENS)):
        if values[name] > most:
            raise ConfigError(f"{name}={values[name]} must be at most {most:,}")
    if not 0 < values["top_p"] <= 1:
        raise ConfigError(f"top_p={values['top_p']} must be above 0 and at most 1")
    if values["seed"] > 2**62:
        raise ConfigError(f"seed={values['seed']} must be at most {2**62}")
    if values["stop"] == "":
        raise ConfigError("stop is empty, and every text has that in it; leave it out or give what a text ends with")
    if values["dtype"] not in (None, *PRECISIONS):
        raise ConfigError(f"dtype={values['dtype']} must be {', '.join(PRECISIONS)} or None")


def read_start(start: str) -> str:
    """The text that `start` is, or the contents of the file it names."""
    if not start.startswith(FILE):
        return start
    path = Path(start.removeprefix(FILE))
    with readable(path, DataError):
        return path.read_text(encoding="utf-8-sig")  # with any kind of line ends, and the mark that some editors put first


def start_ids(tokenizer: Tokenizer, start: str) -> list[int]:
    """The ids of a start, never none. With GPT-2's tokenizer, <|endoftext|> in it is that token, as nanoGPT has it."""
    from ingot.backends.sampling import prompt_ids
    from ingot.data.tokenizers.gpt2 import END_OF_TEXT

    parts = [tokenizer.encode(part).tolist() for part in (start.split(END_OF_TEXT) if tokenizer.kind == "gpt2" else [start])]
    ids = list(parts[0])
    for part in parts[1:]:
        ids += [tokenizer.bos, *part]
    return ids or prompt_ids(tokenizer, "")


def text_of(tokenizer: Tokenizer, ids: list[int], at_start: bool) -> str:
    """What ids say; GPT-2's mark between documents is shown, as nanoGPT does."""
    from ingot.data.tokenizers.gpt2 import END_OF_TEXT

    parts: list[list[int]] = [[]]
    for i in ids:
        if tokenizer.kind == "gpt2" and i == tokenizer.bos:
            parts.append([])
        else:
            parts[-1].append(i)
    return END_OF_TEXT.join(tokenizer.decode_bytes(part, at_start).decode("utf-8", "replace") for part in parts)


def _machine(name: str, dtype: object) -> tuple[Device, str]:
    """The device and precision that the keys name."""
    from ingot.compat.nanogpt.translate import torch_device_named

    device = torch_device_named(name, "sample.py")
    if device.kind != "cuda":
        if dtype not in (None, "float32"):
            warn(f"dtype={dtype} is for GPUs; computing in float32")
        return device, "fp32"
    return device, device.precision(PRECISIONS[str(dtype)] if dtype else "auto")


def _backend(loaded: LoadedModel) -> TorchInference:
    """The model as torch has it: texts are written side by side, in a number format of their own."""
    from ingot.backends.torch.inference import TorchInference

    assert isinstance(loaded.backend, TorchInference)
    return loaded.backend
