"""Every setting of a run, with its name, type, default and description, and the checks that involve several settings.

`--help`, the commented YAML of `ingot init`, docs/configuration.md and the JSON schema are generated from this file. A field's
description says what the value does and gives its unit. The model settings are defined in model/settings.py.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ingot.model.settings import FAMILIES as FAMILIES
from ingot.model.settings import AnyModel, Count, Fraction, GPT2Settings, Positive, Rate, Section, Seed, Size

GPT2_VOCAB_SIZE, GPT2_PADDED_VOCAB_SIZE = 50257, 50304  # the padded size is a multiple of 64
Momentum = Annotated[float, Field(ge=0, lt=1)]
StdMultiple = Annotated[float, Field(gt=0, le=1000)]
Kernel = Literal["loss", "rotary", "qkv", "mlp", "gate", "scales", "stream"]


class PhaseSection(Section):
    """A phase of the run with its own mix of buckets."""

    tokens: Positive = Field(
        description="Length of the phase in target tokens. The next phase begins at the first step after this length is reached; "
        "the last phase lasts until the end of the run."
    )
    mix: dict[str, Rate] = Field(description="Sampling weight of each bucket in this phase, as in data.mix.")


class DataSection(Section):
    """The training data and the order in which it is read."""

    path: str = Field(
        "sample:shakespeare",
        description="Training data: a folder made by `ingot data prepare`; a folder with train/BUCKET/ and val/BUCKET/ that "
        "contain .bin and .idx or .jsonl files; a single .jsonl or .txt file; the URL of a prepared folder (s3://, gs://); or "
        "sample:shakespeare, a text that comes with the package. sample:shakespeare+bpe:2048 also names the tokenizer to use if "
        "data.tokenizer is null.",
    )
    tokenizer: str | None = Field(
        None,
        description="Tokenizer of the data: byte, char, bpe:N (byte-level BPE with N ids, trained on the training text), gpt2, a "
        "file (.model or tokenizer.json) or a name on the Hugging Face hub. null: byte for sample:shakespeare. A prepared "
        "folder contains its tokenizer; if this setting also names a tokenizer, it must be the same.",
    )
    trust_tokens: bool = Field(
        False,
        description="true: accept token files of other programs without checking them; needed for random tokens or a lossy "
        "tokenizer. false: reject them if decoding and re-encoding a sample of their tokens changes it.",
    )
    seq_len: Size = Field(256, description="Tokens per training row.")
    sampling: Literal["shuffle", "redraw", "random", "stream", "pack", "document"] = Field(
        "shuffle",
        description="Order of the data. shuffle: each window of seq_len tokens once per epoch, reshuffled every epoch. redraw: "
        "documents are reshuffled every epoch, concatenated and cut into rows from a random offset, and the rows are shuffled; "
        "each token is used once per epoch. random: windows at random positions, drawn with replacement. stream: tokens in file "
        "order, starting over at the end. pack: whole documents, reshuffled every epoch and packed into rows; a document longer "
        "than a row is split. document: one document per row, padded to seq_len; a longer document is split.",
    )
    overlap: Count = Field(
        0,
        description="With data.sampling=pack or document, a document longer than a row is split into chunks. Each chunk but "
        "the first begins with this many tokens of the previous one, as context only. At most half of data.seq_len.",
    )
    epochs: Positive | None = Field(None, description="End the run after this many epochs. null: repeat the data without limit.")
    mix: dict[str, Rate] = Field(
        {},
        description="Sampling weight of each bucket (a named part of the data): {web: 3, books: 1} draws 3/4 of the rows from "
        "web. A bucket without a weight is not read. Empty: read each token once per epoch, whatever its bucket.",
    )
    phases: list[PhaseSection] = Field(
        [],
        description="Phases of the run, one after another, each with its own mix, instead of data.mix. Each bucket continues "
        "where it stopped in the previous phase.",
    )
    exhausted: Literal["halt", "renormalise"] = Field(
        "halt",
        description="What to do when a bucket has been read data.epochs times and the mix still draws from it. halt: save and "
        "end the run with the status `halted`. renormalise: distribute its weight over the other buckets.",
    )
    already_read: str | None = Field(
        None,
        description="With data.sampling=pack or document, a file that lists documents to skip in the first epoch. "
        "`gpt-simple train` writes such a file when it resumes a run of the original gpt-simple, to list what that run has read.",
    )
    spans: Positive | Annotated[list[Positive], Field(min_length=1)] = Field(
        1,
        description="With data.sampling=stream, split a step's rows into this many equal parts, each starting one token after "
        "the last target of the previous part. A list gives the number of rows of each part; it repeats until the step is full.",
    )
    document_mask: bool = Field(
        False,
        description="Each token attends only to its own document, in training and in evaluation. false: to all earlier tokens of "
        "the row.",
    )
    seed: Seed = Field(1337, description="Random seed of the data order; training.seed is used for everything else.")


class EvaluationSection(Section):
    """Evaluation of the model during and after training."""

    every: Count = Field(0, description="Steps between evaluations. 0: only those set by evaluation.points, at_start and at_end.")
    points: Count = Field(
        0,
        description="Number of evaluations spread evenly over budget.seconds, including the final one. 0: use evaluation.every.",
    )
    at_start: bool = Field(False, description="Also evaluate before the first step.")
    at_end: bool = Field(True, description="Evaluate when the run is complete.")
    rows: Positive | None = Field(
        None,
        description="Number of validation rows to score at each evaluation during training. null: all rows. The final "
        "evaluation uses evaluation.final_rows instead.",
    )
    final_rows: Positive | Literal["auto"] | None = Field(
        "auto",
        description="Number of rows, evenly spaced over the validation split, to score in the final evaluation and for the "
        "artifact. null: all rows. auto: all rows or, if budget.seconds is set without budget.artifact_bytes, at most as many as "
        "can be scored in half of budget.seconds, or in 10 seconds if that is longer. Evaluations during training then have "
        "the same limit, and some are skipped if evaluation would take longer in total than the training plus this limit. "
        "Reports state if a score covers only part of the rows.",
    )
    train_rows: Positive | None = Field(
        None, description="Number of training rows to score at every evaluation, besides the validation rows. null: none."
    )
    whole_rows: bool = Field(
        False, description="Skip the last validation row if the text does not fill it. false: score every token of the split."
    )
    stride: Positive | None = Field(
        None,
        description="Tokens between the starts of consecutive validation rows. null: data.seq_len, so that rows do not overlap. "
        "With a smaller stride, only the last `stride` tokens of each row are scored, so that they see more context; evaluation "
        "then takes seq_len / stride times as long.",
    )
    micro_batch: Positive = Field(64, description="Rows per forward pass of an evaluation, on one rank.")
    bytes: Literal["text", "pieces"] = Field(
        "text",
        description="How val_bpb counts bytes. text: UTF-8 bytes of the original text, counted during preparation. pieces: sum "
        "of the byte lengths of all target tokens, as in the golf challenge. If the counts differ, the run reports both scores.",
    )
    sample_tokens: Annotated[int, Field(ge=0, le=1_000_000)] = Field(
        0, description="Number of tokens to generate at each evaluation and write to samples/. 0: no samples."
    )
    sample_prompt: str = Field("", description="Prompt for the samples. Empty: only the start-of-document token.")
    temperature: Rate = Field(0.8, description="Sampling temperature for the samples.")
    top_k: Count = Field(0, description="Sample only from the k most likely tokens. 0: sample from all tokens.")
    tasks: str | list[str] | None = Field(
        None,
        description="Tasks that each evaluation also scores, as a list or separated by commas: any of hellaswag, lambada, "
        "arc_easy, arc_challenge, piqa, winogrande and blimp. null: none.",
    )
    task_data: str | None = Field(
        None, description="Folder with the task files (see docs/tasks.md). null: download them from the Hugging Face hub."
    )
    task_items: Positive | None = Field(100, description="Number of items to score from the start of each task file. null: all.")
    task_truncate: bool = Field(
        False, description="Truncate task texts that exceed the context, dropping their beginning. false: raise an error."
    )


class GroupSection(Section):
    """A group of parameters with its own optimizer and learning rate."""

    name: Annotated[str, Field(min_length=1)] = Field(description="Name of the group, for use in training.stages.")
    match: Annotated[str, Field(min_length=1)] = Field(
        description="Pattern for parameter names: * matches any text, ? any character, [qk] a q or a k. A parameter belongs to "
        "the first group whose pattern matches."
    )
    optimizer: Literal["adamw", "muon"] = Field("adamw", description="Optimizer of the group. Muon takes matrices only.")
    learning_rate: Rate | None = Field(
        None, description="Peak learning rate. null: optimizer.learning_rate, or optimizer.muon_learning_rate with muon."
    )
    momentum: Momentum | None = Field(None, description="Muon's momentum after its warm-up. null: optimizer.muon_momentum.")
    weight_decay: Rate | None = Field(
        None,
        description="Decoupled weight decay of all parameters in the group, including gains and biases. null: "
        "optimizer.weight_decay, or optimizer.muon_weight_decay with muon.",
    )
    beta1: Momentum | None = Field(None, description="Decay of AdamW's first moment. null: optimizer.beta1.")
    beta2: Momentum | None = Field(None, description="Decay of AdamW's second moment. null: optimizer.beta2.")
    epsilon: Rate | None = Field(None, description="Epsilon of AdamW. null: optimizer.epsilon.")


class OptimizerSection(Section):
    """The optimizers and the learning rate schedule."""

    name: Literal["adamw", "muon"] = Field(
        "adamw", description="adamw: AdamW for all parameters. muon: Muon for the matrices inside the blocks, AdamW for the rest."
    )
    learning_rate: Rate = Field(6e-4, description="Peak learning rate of AdamW.")
    embedding_learning_rate: Rate | None = Field(
        None, description="Peak learning rate of the token and position embeddings. null: learning_rate."
    )
    head_learning_rate: Rate | None = Field(
        None, description="Peak learning rate of an output head that is not tied to the embedding. null: learning_rate."
    )
    scalar_learning_rate: Rate | None = Field(
        None, description="Peak learning rate of parameters that are not matrices, such as gains and biases. null: learning_rate."
    )
    weight_decay: Rate = Field(0.1, description="Decoupled weight decay of AdamW, on tensors with two or more dimensions.")
    beta1: Momentum = Field(0.9, description="Decay of AdamW's first moment, a running mean of gradients.")
    beta2: Momentum = Field(0.95, description="Decay of AdamW's second moment, a running mean of squared gradients.")
    epsilon: Rate = Field(1e-8, description="Epsilon of AdamW, added to the square root of the second moment.")
    clip_norm: Rate = Field(
        1.0, description="Maximum global gradient norm; larger gradients are scaled down to it. 0: no clipping."
    )
    muon_learning_rate: Rate = Field(0.02, description="Peak learning rate of Muon.")
    muon_weight_decay: Rate = Field(0.0, description="Decoupled weight decay of Muon.")
    muon_weight_decay_schedule: Literal["constant", "falling", "rising"] = Field(
        "constant",
        description="How Muon's weight decay changes over the budget, in addition to following the learning rate. constant: "
        "not at all. falling: linearly to 0. rising: linearly to 0.25 times its value halfway, then linearly to 1.25 times it.",
    )
    muon_cautious: bool = Field(False, description="Decay only the weights that Muon's update also moves towards 0.")
    muon_beta2: Momentum | None = Field(
        None,
        description="Use NorMuon, with this decay: divide each row of an update (each column of a wide matrix) by its running "
        "root mean square, then restore the norm of the whole update. null: use plain Muon.",
    )
    muon_momentum: Momentum = Field(0.95, description="Momentum of Muon, after the momentum warm-up if there is one.")
    muon_momentum_start: Momentum | None = Field(
        None, description="Muon's momentum at the first step, from which it rises linearly to muon_momentum. null: no warm-up."
    )
    muon_momentum_warmup_steps: Count = Field(0, description="Number of steps of Muon's linear momentum warm-up.")
    muon_nesterov: bool = Field(True, description="Use Nesterov momentum in Muon.")
    muon_iterations: Annotated[int, Field(ge=1, le=100)] = Field(5, description="Iterations of Muon's orthogonalisation.")
    muon_coefficients: Literal["newton-schulz", "polar-express"] = Field(
        "newton-schulz",
        description="Polynomials of Muon's orthogonalisation. newton-schulz: the same polynomial in every iteration. "
        "polar-express: an optimal polynomial for each iteration.",
    )
    muon_normalise_rows: bool = Field(False, description="Scale all rows of each Muon update to the same norm.")
    muon_precision: Literal["auto", "bf16", "fp32"] = Field(
        "auto", description="dtype of Muon's orthogonalisation. auto: bf16 on GPUs, fp32 on CPUs."
    )
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None,
        description="Keep an exponential moving average of the weights with this decay per step; evaluation, samples and the "
        "exported model use this average. null: no average.",
    )
    schedule: Literal["constant", "cosine", "wsd", "budget", "warmdown"] = Field(
        "cosine",
        description="Learning rate after the warm-up. constant: the peak throughout. cosine: down to the floor at step "
        "decay_steps. wsd: constant, then linear to the floor over the last decay_steps. budget: constant, then linear to the "
        "floor over the last decay_fraction of the budget (seconds or steps, whichever is further along). warmdown: like wsd, "
        "but if budget.seconds is set, the decay takes the time of decay_steps steps at the average step time so far.",
    )
    warmup_steps: Count = Field(0, description="Steps over which the learning rate rises linearly from 0.")
    decay_steps: Positive | None = Field(
        None,
        description="Length of the decay in steps. cosine: from the start of the run (null: training.max_steps). wsd: at the end "
        "of the run (null: a fifth of training.max_steps). warmdown: at the end of the run.",
    )
    decay_fraction: Fraction = Field(
        0.5, description="Final fraction of the budget over which schedule=budget decays the learning rate."
    )
    floor: Fraction = Field(0.1, description="Final learning rate as a fraction of its peak.")
    groups: list[GroupSection] = Field(
        [],
        description="Parameter groups, selected by parameter names, each with its own optimizer and learning rate. Parameters "
        "that match no group are grouped by kind (such as embedding, head and matrix).",
    )

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the names of the built-in groups, which hold the parameters that match no entry of `groups`."""
        return ("embedding", "head", "matrix", *(["rest"] if self.name == "muon" else []), "scalar")


class StageSection(Section):
    """A stage of the run with its own batch size, sequence length and learning rates."""

    share: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="Length of the stage as a fraction of the budget (seconds or steps, whichever is further along). The shares "
        "of all stages must add up to 1.",
    )
    steps: Positive | None = Field(
        None, description="Length of the stage in steps, instead of a share. The last stage continues to the end of the run."
    )
    tokens_per_step: Positive | None = Field(
        None, description="Tokens per step, a multiple of data.seq_len. null: training.tokens_per_step."
    )
    seq_len: Positive | None = Field(
        None,
        description="Tokens per row: data.seq_len or a divisor of it; at least one stage must use data.seq_len. null: "
        "data.seq_len.",
    )
    rate: Rate = Field(1.0, description="Factor applied to all learning rates in this stage, in addition to the schedule.")
    rates: dict[str, Rate] = Field({}, description="Factors for the learning rates of parameter groups, such as {matrix: 0.5}.")
    model: dict[str, int | float] = Field(
        {},
        description="Keyword arguments passed to the model's `set` method when the stage begins, such as {window: 128}. "
        "Evaluation, samples and the exported model use the arguments of the last stage.",
    )


class TrainingSection(Section):
    """The training loop (length, batches, device) and the output folder."""

    max_steps: Count | None = Field(None, description="Number of optimizer steps. null: train until budget.seconds are spent.")
    tokens_per_step: Positive = Field(
        16384,
        description="Tokens per optimizer step, summed over all ranks. The number of gradient accumulation steps follows from "
        "this number, the micro-batch and the number of ranks.",
    )
    stages: list[StageSection] = Field(
        [],
        description="Stages of the run, in order, each with its own batch size, row length and learning rates. Empty: one stage.",
    )
    micro_batch: Positive | Literal["auto"] = Field(
        "auto",
        description="Rows per forward pass on one rank. auto: on a GPU, Ingot times a micro-batch of all rows of a step, of "
        "half of them, a quarter and so on, and uses the smallest that is about as fast per row as the fastest; on other "
        "devices, as many rows as fit in 16,384 tokens.",
    )
    seed: Seed = Field(1337, description="Random seed of the initial weights and of dropout.")
    device: str = Field("auto", description="Device to use: cpu, cuda, cuda:N, mps or mlx. auto: the fastest available device.")
    threads: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = Field(
        "auto",
        description="Number of CPU threads per rank, which affects results slightly (rounding). auto: OMP_NUM_THREADS if set, "
        "else the fastest number, which is measured when the run begins and kept when it is resumed.",
    )
    precision: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        "auto",
        description="dtype of the forward and backward pass; weights stay fp32. auto: bf16 on GPUs that support it, fp16 on "
        "older GPUs, else fp32.",
    )
    compile: bool | Literal["auto", "blocks"] = Field(
        "auto",
        description="Use torch.compile. true: compile the whole model. blocks: compile each block and the loss separately, which "
        "starts faster and may make steps slightly slower. auto: true on CUDA if that is expected to save time, else false.",
    )
    compile_optimizer: bool | Literal["auto"] = Field(
        "auto",
        description="Compile Muon's step on CUDA: it launches fewer kernels, but the run takes longer to start. Without effect "
        "on several ranks. auto: only for NorMuon with a compiled model.",
    )
    cuda_graphs: bool | Literal["auto"] = Field(
        "auto",
        description="Record the forward and backward pass of a compiled model as CUDA graphs (single GPU only): short steps then "
        "do not wait for kernel launches, but the run takes more memory. auto: for steps of at most 32,768 tokens and built-in "
        "models of up to 200 million parameters, unless stages, document_mask or deterministic is used.",
    )
    deterministic: bool = Field(
        False,
        description="Make GPU results bit-identical between equal runs with the same micro_batch, even if they are stopped and "
        "resumed. Slower; only the gpt2 family is compiled. CPUs are deterministic for a fixed number of threads.",
    )
    loss_chunk: Positive | None = Field(
        None,
        description="Number of tokens whose logits are in memory at once. null: all tokens of the micro-batch. Smaller chunks "
        "take less memory and slightly more time.",
    )
    kernels: Literal["auto", "off"] | list[Kernel] = Field(
        "auto",
        description="Which of Ingot's own kernels to use, on NVIDIA GPUs in bf16. loss: softcap, loss and gradient in one pass "
        "over the logits. rotary: norm, rotation and gain of queries and keys. qkv: one matmul for queries, keys and values of "
        "golf and llama, with FlashAttention 4. mlp: the activation of golf, frontier and gpt2, fused into the matmuls around "
        "it. gate: llama's gated activation, on Hopper GPUs with the extra `flash`. scales: the branch scales of golf, folded "
        "into the weights. stream: the residual stream of gpt2 and llama in bf16. auto: all kernels that run on this device; "
        "but with at most 32,768 tokens per step and GPU and without cuda_graphs, only loss, scales and stream, because "
        "launching the others would take more time than they save. off: none.",
    )
    fp8_head: bool = Field(
        False,
        description="Compute the output head's matmul and its gradients in fp8 with fixed scales, on NVIDIA GPUs of compute "
        "capability 8.9 or higher: faster for large vocabularies, but less precise. Stored weights and evaluation do not change.",
    )
    later_targets: list[Annotated[float, Field(gt=0)]] = Field(
        [],
        description="Loss weights of additional targets: the logits are also trained to predict the second, third, ... token "
        "ahead. The weights fall linearly to 0 by the end of the second-to-last stage, so this needs training.stages. Reported "
        "losses do not include these targets.",
    )
    parallel: Literal["auto", "ddp", "fsdp", "hsdp"] = Field(
        "auto",
        description="How the model is spread over ranks. ddp: every rank holds the whole model. fsdp: weights, gradients and "
        "optimizer state are divided among all ranks. hsdp: among the ranks of each node. auto: ddp if it is estimated to need "
        "at most three quarters of a rank's memory, else fsdp on one node and hsdp on several; always ddp for a custom model.",
    )
    cpu_offload: bool = Field(
        False,
        description="With fsdp and hsdp, keep weights, gradients and optimizer state in the memory of the host, and copy the "
        "weights of one block at a time to the GPU. Needs optimizer.name=adamw.",
    )
    gradient_checkpointing: bool | Positive | Literal["auto"] = Field(
        False,
        description="Recompute activations in the backward pass, which takes less memory and a third more time. true: keep only "
        "the inputs of blocks and recompute the rest. A number k: do so only in every k-th block (MLX: in every block). auto: "
        "in every block if training is estimated to need more than three quarters of the device's memory otherwise; never for a "
        "custom model.",
    )
    ddp_python_reducer: bool = Field(
        False,
        description="With a compiled model on several ranks, overlap gradient communication with the backward pass through "
        "torch's Python reducer, which also works with gradient checkpointing and document masks. false: if either of these is "
        "used, gradients are all-reduced only after the backward pass.",
    )
    collective_timeout_seconds: Annotated[float, Field(ge=1, le=1e6)] = Field(
        1800.0,
        description="Seconds that a rank waits for the others before the run fails. It must be longer than any work that a rank "
        "does alone, such as the first rank's saves at the end of the run.",
    )
    eager: bool = Field(
        True,
        description="On MLX, evaluate each micro-batch before starting the next. false: evaluate the whole step at once, which "
        "takes more memory.",
    )
    priming_steps: Annotated[int, Field(ge=0, le=10_000)] | Literal["auto"] = Field(
        "auto",
        description="Warm-up steps that are run and undone before the training time is counted, so that compilation does not use "
        "up budget.seconds. auto: 2 if the model is compiled, else 0.",
    )
    weights: str | None = Field(
        None,
        description="Initial weights: a run folder, checkpoint or artifact. null: random initialisation. Ignored when a run "
        "resumes from a checkpoint.",
    )
    output_dir: str | None = Field(
        None,
        description="The run folder or its URL (s3://, gs://). null: runs/<recipe>-<time>. An unfinished run there is resumed.",
    )
    resume: Literal["auto", "never"] | str = Field(
        "auto",
        description="auto: resume from the newest valid checkpoint in output_dir, if there is one. never: fail if output_dir has "
        "checkpoints. The path of a checkpoint or the path or URL of another run: copy its state to output_dir and resume there.",
    )
    max_runtime_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None,
        description="Time limit of this session in seconds, including start-up, evaluation and the last save. null: the "
        "time left until SLURM_JOB_END_TIME if this environment variable is set, else the seconds in INGOT_MAX_RUNTIME or "
        "GPT_SIMPLE_MAX_RUNTIME, else no limit.",
    )
    walltime_reserve_seconds: Rate | None = Field(
        None,
        description="Seconds of training.max_runtime_seconds that are reserved for the last save. null: twice the duration of "
        "the longest save so far, but at least 30 s or a tenth of the session, whichever is less.",
    )
    save_every: Count = Field(0, description="Steps between checkpoints. 0: only save_seconds applies.")
    save_seconds: Rate = Field(300.0, description="Seconds between checkpoints. 0: only save_every applies.")
    keep_last: Positive | None = Field(
        2,
        description="Number of the most recent periodic checkpoints to keep. The best one, milestones, the newest one saved at a "
        "stop and the one saved at the end of the run are always kept. null: keep all.",
    )
    keep_every: Count = Field(
        0, description="Checkpoints at multiples of this step count are milestones, which are never deleted. 0: no milestones."
    )


class BudgetSection(Section):
    """Limits on training time and on the size of the artifact."""

    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None,
        description="Training time in seconds, over all sessions of the run. Evaluation, saving and start-up do not count. "
        "null: no limit.",
    )
    overshoot: bool = Field(
        False, description="Finish the step during which the time runs out. false: never start a step that would not end in time."
    )
    artifact_bytes: Positive | None = Field(None, description="Maximum size of the artifact in bytes. null: no limit.")


class ArtifactSection(Section):
    """The model file written when the run is complete."""

    write: bool = Field(True, description="Write the artifact at the end of the run.")
    score: bool = Field(True, description="Load the artifact in a fresh process and report its bits per byte.")
    quantiser: Literal["none", "int8", "int8-golf", "std", "gptq"] = Field(
        "int8",
        description="How the weights are stored. none: unquantised, in artifact.dtype. int8: large matrices as int8 with one "
        "scale per row. int8-golf: like int8, but no scale is below 1/127, as in the golf challenge. std: weights are "
        "rounded to artifact.bits bits, with a step size proportional to the standard deviation of the row. gptq: the same "
        "step sizes, but rounding minimises the change in the outputs of each matrix on training text.",
    )
    bits: int = Field(6, ge=2, le=8, description="Bits per weight of quantised matrices (quantisers std and gptq only).")
    k: StdMultiple | Literal["auto"] = Field(
        "auto",
        description="Clipping range of quantised matrices, in standard deviations of the row (quantisers std and gptq only): a "
        "smaller k means finer steps and a larger file. auto: the finest steps for which the file fits in budget.artifact_bytes, "
        "with more bits than artifact.bits if too many weights would be clipped; k = 8 if there is no limit.",
    )
    embedding_bits: int = Field(8, ge=2, le=8, description="Like artifact.bits, for embeddings, lookup tables and the head.")
    embedding_k: StdMultiple | Literal["auto"] = Field(
        "auto",
        description="Like artifact.k, for embeddings, lookup tables and the head. auto: if there is a size limit and artifact.k "
        "is auto, the value that scores best on training text; otherwise 5.",
    )
    codec: Literal["none", "zlib", "lzma", "rans"] = Field(
        "lzma", description="Compression of the whole file. rans, an entropy coder, compresses low-bit weights best."
    )
    dtype: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="dtype of the weights if artifact.quantiser is none.")
    tokenizer: bool = Field(
        True, description="Include the tokenizer, so that the artifact alone can generate text. false: a smaller file."
    )


class TrackingSection(Section):
    """Logging during the run."""

    log_every: Positive = Field(
        10, description="Steps between lines in metrics.jsonl and log.txt. The first ten steps are always logged."
    )
    heartbeat_seconds: Annotated[float, Field(gt=0, le=3600)] = Field(5.0, description="Seconds between updates of state.json.")
    wandb_project: str | None = Field(
        None,
        description="Weights & Biases project to log to. All sessions of a run log to one W&B run. Needs the extra `wandb`. "
        "null: no W&B run.",
    )
    wandb_run_name: str | None = Field(None, description="Name of the W&B run. null: the name of the run folder.")
    wandb_mode: Literal["online", "offline"] | None = Field(
        None, description="offline: keep metrics in the run folder for `wandb sync`. null: the value of WANDB_MODE, else online."
    )
    trackio_project: str | None = Field(
        None,
        description="trackio project to log to, in trackio's local database. The run is named after its folder, plus a random "
        "suffix. Needs the extra `trackio`. null: no trackio run.",
    )
    tensorboard: bool = Field(
        False, description="Also write TensorBoard events to tensorboard/ in the run folder. Needs the extra `tensorboard`."
    )


class Config(Section):
    """The complete config of one run."""

    model: AnyModel = Field(default_factory=GPT2Settings)
    data: DataSection = Field(default_factory=DataSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    training: TrainingSection = Field(default_factory=TrainingSection)
    budget: BudgetSection = Field(default_factory=BudgetSection)
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)
    artifact: ArtifactSection = Field(default_factory=ArtifactSection)
    tracking: TrackingSection = Field(default_factory=TrackingSection)

    @model_validator(mode="before")
    @classmethod
    def _name_family(cls, tree: Any) -> Any:
        model = tree.get("model") if isinstance(tree, dict) else None
        if isinstance(model, dict) and "family" not in model:
            return {**tree, "model": {**model, "family": "gpt2" if model.get("file") is None else "file"}}
        return tree

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        _check_rows(self)
        _check_data(self.data, self.training)
        if self.training.max_steps is None and self.budget.seconds is None:
            advice = "set training.max_steps or budget.seconds, or start from one of `ingot recipes`"
            raise ValueError(f"this run would never end: {advice}")
        if not self.training.save_every and not self.training.save_seconds:
            raise ValueError("training.save_every and training.save_seconds are both 0, so nothing would be saved; set one")
        _check_optimizer(self.optimizer, self.training.max_steps)
        _check_stages(self)
        return self

    @property
    def stride(self) -> int:
        """Return the number of tokens between the starts of consecutive validation rows."""
        return self.evaluation.stride or self.data.seq_len

    @property
    def suggested_tokenizer(self) -> str | None:
        """Return the tokenizer to recommend when text is prepared for this config; None: `ingot data prepare` chooses one."""
        return self.data.tokenizer or ("gpt2" if (self.model.vocab_size or 0) >= GPT2_VOCAB_SIZE else None)

    @property
    def rows_per_step(self) -> int:
        return self.training.tokens_per_step // self.data.seq_len


# Checks across settings. Each raises ValueError with a one-sentence message that names settings by their dotted paths.


def _check_rows(config: Config) -> None:
    data, seq_len, tokens_per_step = config.data, config.data.seq_len, config.training.tokens_per_step
    batches = {"training.tokens_per_step": tokens_per_step} | {
        f"training.stages.{number}.tokens_per_step": stage.tokens_per_step
        for number, stage in enumerate(config.training.stages)
        if stage.tokens_per_step is not None
    }
    for name, tokens in batches.items():
        if tokens % seq_len:
            below = tokens // seq_len * seq_len
            nearest = f"multiples are {below:,} and {below + seq_len:,}" if below else f"multiple is {seq_len:,}"
            raise ValueError(f"{name}={tokens:,} is not a multiple of data.seq_len={seq_len:,}; the nearest {nearest}")
    if config.model.context is not None and config.model.context < seq_len:
        context = f"model.context={config.model.context}"
        raise ValueError(f"{context} is shorter than data.seq_len={seq_len}; raise model.context or set it to null")
    if config.stride > seq_len:
        raise ValueError(f"evaluation.stride={config.stride} must be at most data.seq_len={seq_len}, or tokens would be skipped")
    spans = data.spans if isinstance(data.spans, int) else sum(data.spans)
    if data.sampling == "stream" and config.rows_per_step % spans:
        total = "" if isinstance(data.spans, int) else f", {spans} rows in all,"
        rows = f"{config.rows_per_step} rows of a step (training.tokens_per_step / data.seq_len)"
        raise ValueError(f"data.spans={data.spans}{total} does not divide the {rows}")


def _check_data(data: DataSection, training: TrainingSection) -> None:
    if data.sampling not in ("pack", "document"):
        for name, is_set in ((f"data.overlap={data.overlap}", data.overlap), ("data.already_read", data.already_read)):
            if is_set:
                raise ValueError(f"{name} works only with data.sampling=pack or document, not {data.sampling}; use pack")
    if data.overlap > data.seq_len // 2:
        raise ValueError(f"data.overlap={data.overlap} is more than half of data.seq_len={data.seq_len}")
    if data.epochs is not None and data.sampling == "random":
        raise ValueError("data.epochs is set, but data.sampling=random draws with replacement and has no epochs; use shuffle")
    if data.mix and data.phases:
        raise ValueError("data.mix and data.phases are both set, but each phase has its own mix; leave data.mix out")
    mixes = {"data.mix": data.mix} if data.mix else {f"data.phases.{i}.mix": phase.mix for i, phase in enumerate(data.phases)}
    for name, mix in mixes.items():
        if not any(mix.values()):
            raise ValueError(f"{name} gives no bucket a weight above 0")
        if data.sampling == "stream":
            raise ValueError(f"{name} cannot be combined with data.sampling=stream, which reads one stream; use shuffle or pack")
    if data.phases and any(stage.seq_len not in (None, data.seq_len) for stage in training.stages):
        raise ValueError("data.phases cannot be combined with training.stages that have their own seq_len")


def _check_optimizer(o: OptimizerSection, max_steps: int | None) -> None:
    counts = Counter(group.name for group in o.groups)
    for number, group in enumerate(o.groups):
        name = f"optimizer.groups.{number}"
        if counts[group.name] > 1 or group.name in o.kinds:
            owner = "two groups" if counts[group.name] > 1 else "a built-in group"
            raise ValueError(f"{name}.name={group.name} is used by {owner}; choose another name")
        other, foreign = ("adamw", ("beta1", "beta2", "epsilon")) if group.optimizer == "muon" else ("muon", ("momentum",))
        for setting in foreign:
            if getattr(group, setting) is not None:
                why = f"is a setting of {other}, but {name}.optimizer={group.optimizer}"
                raise ValueError(f"{name}.{setting} {why}; leave it out")
    name = f"optimizer.schedule={o.schedule}"
    if o.schedule == "warmdown" and o.decay_steps is None:
        raise ValueError(f"{name} needs optimizer.decay_steps, the length of the decay in steps")
    if o.schedule not in ("cosine", "wsd"):
        return
    if max_steps is None and (o.schedule == "wsd" or o.decay_steps is None):
        advice = "set it, or use optimizer.schedule=budget, which follows the clock"
        raise ValueError(f"{name} counts steps, but training.max_steps is null; {advice}")
    if o.warmup_steps >= (o.decay_steps if o.schedule == "cosine" and o.decay_steps else max_steps or 1):
        advice = "lower it or raise training.max_steps"
        raise ValueError(f"optimizer.warmup_steps={o.warmup_steps} leaves no steps for the decay; {advice}")


def _check_stages(config: Config) -> None:
    stages, seq_len, max_steps = config.training.stages, config.data.seq_len, config.training.max_steps
    if config.training.later_targets and (len(stages) < 2 or config.model.family == "file"):
        raise ValueError("training.later_targets needs at least two training.stages and a model of a built-in family")
    if not stages:
        return
    groups = [*(group.name for group in config.optimizer.groups), *config.optimizer.kinds]
    for number, stage in enumerate(stages):
        name = f"training.stages.{number}"
        if (stage.share is None) == (stage.steps is None):
            has = "neither share nor steps" if stage.share is None else "both share and steps"
            raise ValueError(f"{name} has {has}; set exactly one of the two")
        if stage.seq_len is not None and seq_len % stage.seq_len:
            problem = "is longer than" if stage.seq_len > seq_len else "does not divide"
            advice = "choose a divisor of data.seq_len"
            raise ValueError(f"{name}.seq_len={stage.seq_len} {problem} data.seq_len={seq_len}; {advice}")
        if stage.model.keys() != stages[0].model.keys():
            key = min(stage.model.keys() ^ stages[0].model.keys())
            raise ValueError(f"{name}.model: {key} is set in some stages and not in others; set it in all of them")
        if unknown := [group for group in stage.rates if group not in groups]:
            raise ValueError(f"{name}.rates.{unknown[0]}: unknown group; the groups are {', '.join(groups)}")
    if config.data.sampling == "stream":
        raise ValueError("training.stages cannot be combined with data.sampling=stream; use shuffle, redraw, random or pack")
    longest = max(stage.seq_len or seq_len for stage in stages)
    if longest < seq_len:
        rows = f"the longest rows have {longest} tokens"
        raise ValueError(f"training.stages: {rows}, but data.seq_len={seq_len}; set data.seq_len to {longest}")
    shares, steps = [stage.share for stage in stages if stage.share], [stage.steps for stage in stages if stage.steps]
    if shares and steps:
        raise ValueError("training.stages: some stages have a share and some have steps; use only shares or only steps")
    if shares and abs(sum(shares) - 1) > 1e-6:
        raise ValueError(f"training.stages: the shares add up to {sum(shares):g}, not to 1")
    if steps and max_steps is not None and sum(steps) > max_steps:
        raise ValueError(f"training.stages: the stages have {sum(steps):,} steps, but training.max_steps={max_steps:,}")
