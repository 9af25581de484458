"""The settings of `data`: which tokens a run reads, and in which order."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ingot.model.settings import Count, Positive, Rate, Section, Seed, Size


class PhaseSection(Section):
    """A stretch of the run with a mix of buckets of its own."""

    tokens: Positive = Field(
        description="Targets that are trained in this phase; the next begins with the first step after them. The last never ends."
    )
    mix: dict[str, Rate] = Field(description="The weight of each bucket, as in data.mix.")


class DataSection(Section):
    """Which tokens are read, and in which order."""

    path: str = Field(
        "sample:shakespeare",
        description="Folder that `ingot data prepare` made, {train,val}/BUCKET/ with .bin and .idx or with .jsonl, one .jsonl "
        "file, or sample:shakespeare for the text inside the package; sample:shakespeare+bpe:2048 has that tokenizer where "
        "data.tokenizer is null.",
    )
    tokenizer: str | None = Field(
        None,
        description="Tokenizer for a bundled sample, .jsonl or .bin with .idx: byte, char, bpe:N (byte-level BPE with N ids "
        "that are learned from the training text), gpt2, a file (.model or tokenizer.json) or a hub name; null: byte for a "
        "sample. A prepared folder brings its own; if both are given they must agree.",
    )
    trust_tokens: bool = Field(
        False,
        description="Take the tokens of other programs' files as they are. false: refuse them where the tokenizer, given their "
        "text, makes other ones; true is for tokens that were drawn at random and for tokenizers that lose text.",
    )
    seq_len: Size = Field(256, description="Tokens in a training row.")
    sampling: Literal["shuffle", "redraw", "random", "stream", "pack", "document"] = Field(
        "shuffle",
        description="shuffle: every window of seq_len tokens once per epoch, in an order drawn anew each epoch. redraw: "
        "documents in an order drawn anew each epoch, joined, cut into rows from a random place on, and the rows shuffled; every "
        "token once per epoch. random: windows that start anywhere, drawn with replacement. stream: the tokens in their order, "
        "from the first to the last and again. pack: whole documents in an order drawn anew each epoch, fitted into rows; longer "
        "ones are cut. document: the same with one document in a row, the rest of which is empty.",
    )
    overlap: Count = Field(
        0,
        description="pack, document: a document longer than a row is cut into pieces that begin with this many tokens of the "
        "piece before, which are not predicted again. At most half of seq_len.",
    )
    epochs: Positive | None = Field(
        None, description="The run ends when the data has been read this often. null: it is read again and again."
    )
    mix: dict[str, Rate] = Field(
        {},
        description="The weight of each bucket: {web: 3, books: 1} draws three rows of four from web. A bucket without a weight "
        "is not read. Empty: every token once per epoch, whatever its bucket.",
    )
    phases: list[PhaseSection] = Field(
        [], description="Mixes that follow one another, instead of data.mix; each bucket goes on where it stood."
    )
    exhausted: Literal["halt", "renormalise"] = Field(
        "halt",
        description="What happens when data.epochs of a bucket are over and the mix asks for more of it. halt: the run saves and "
        "ends as `halted`. renormalise: the other buckets share its weight.",
    )
    already_read: str | None = Field(
        None,
        description="pack, document: a file that lists documents which another program has read, as `gpt-simple train` writes it "
        "when it goes on with a run of the original. They are left out of the first epoch.",
    )
    spans: Positive | Annotated[list[Positive], Field(min_length=1)] = Field(
        1,
        description="stream: equal parts a step is read in, each of which begins one token after the last target of the one "
        "before. A list: the rows of one part after the other, again and again until the step is full.",
    )
    document_mask: bool = Field(
        False, description="Tokens see only their own document, in training and in evaluation. false: the whole row before them."
    )
    seed: Seed = Field(1337, description="Decides the order of the rows and nothing else.")
