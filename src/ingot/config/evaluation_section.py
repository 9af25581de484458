"""The settings of `evaluation`: how the model is judged while and after it trains."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ingot.model.settings import Count, Positive, Rate, Section


class EvaluationSection(Section):
    """How the model is judged while and after it trains."""

    every: Count = Field(0, description="Steps between evaluations. 0: only at the end.")
    at_start: bool = Field(False, description="Evaluate before the first step too.")
    at_end: bool = Field(True, description="Evaluate when the run is complete.")
    rows: Positive | None = Field(
        None,
        description="Rows of the validation split an evaluation during training reads. null: all. The last evaluation reads "
        "final_rows.",
    )
    final_rows: Positive | Literal["auto"] | None = Field(
        "auto",
        description="Rows that the last evaluation and the artifact's scoring read, spread evenly over the validation split. "
        "null: all. auto: all, unless budget.seconds is set, budget.artifact_bytes is not, and all would take longer than 10 "
        "seconds and half the budget: then as many as that time allows, in evaluations during training too, which also "
        "take no longer in all than the training. A score of a part says so.",
    )
    train_rows: Positive | None = Field(
        None, description="Rows of the training split that are scored beside the validation split. null: none."
    )
    whole_rows: bool = Field(
        False, description="Leave out the last row where the text does not fill it. false: score every token."
    )
    stride: Positive | None = Field(
        None,
        description="Tokens from one validation row to the next. null: data.seq_len, rows that do not overlap. Less: each row "
        "scores only its last `stride` tokens, which see more context; takes seq_len / stride times as long.",
    )
    micro_batch: Positive = Field(64, description="Rows in one forward pass of one rank.")
    bytes: Literal["text", "pieces"] = Field(
        "text",
        description="What val_bpb divides by. text: the UTF-8 bytes of the original text, as preparation counted them. pieces: "
        "the bytes of the tokenizer's pieces, as golf counts them. The other is reported beside it where it differs.",
    )
    sample_tokens: Annotated[int, Field(ge=0, le=1_000_000)] = Field(
        0, description="Tokens of sample text written at each evaluation, into samples/. 0: no samples."
    )
    sample_prompt: str = Field("", description="What the samples begin with. Empty: the start of a document.")
    temperature: Rate = Field(0.8, description="Temperature of the samples.")
    top_k: Count = Field(0, description="Samples are drawn from this many most likely tokens. 0: from all.")
    tasks: str | list[str] | None = Field(
        None,
        description="Tasks that every evaluation scores too, as `ingot eval --tasks` does: hellaswag, lambada, arc_easy, "
        "arc_challenge, piqa, winogrande, blimp; several with commas between them, or a list. null: none.",
    )
    task_data: str | None = Field(
        None,
        description="Folder with the files of the tasks, see docs/tasks.md. null: they are fetched from the Hugging Face hub.",
    )
    task_items: Positive | None = Field(100, description="Items of each file that are scored, the first ones. null: all.")
    task_truncate: bool = Field(
        False, description="Cut the beginnings of tasks' texts that the model does not see whole. false: such texts are an error."
    )
