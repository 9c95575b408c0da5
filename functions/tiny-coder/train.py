"""Train tiny-coder: a small Llama-type model of Python, on the source of Python's own standard library.

    python functions/tiny-coder/train.py --minutes 20

Reads the standard library of the running interpreter (no network), trains a byte-level BPE on it and then the
model, within the given time: the learning rate follows the clock, so a slower machine sees fewer tokens and
still ends annealed. Writes a Hugging Face checkpoint in bfloat16 to `model/` beside this file, and the record
of the run in `loss.csv`, `loss.png` and `training.json`. Held-out loss is in bits a byte, over whole files
that neither the tokenizer nor the model has seen.
"""

import argparse
import csv
import hashlib
import json
import math
import os
import platform
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from matplotlib import pyplot
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

END = "<|endoftext|>"
# Tables of data rather than code, and tests, which would make the output look like neither.
EXCLUDED = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "encodings",
    "pydoc_data",
    "__pycache__",
    "lib2to3",
}
# Keeps runs of spaces, words with their underscores, digits one by one, and punctuation apart.
SPLIT = r" ?[A-Za-z_]+|\d| ?[^\sA-Za-z_\d]+|\n+|[^\S\n]+(?=\S)|\s+"


@dataclass(frozen=True, slots=True)
class ModelShape:
    vocab: int = 2048
    hidden: int = 256
    layers: int = 5
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 640
    context: int = 1024


@dataclass(frozen=True, slots=True)
class TrainingSchedule:
    minutes: float = 20.0
    batch_tokens: int = 4096
    short_context: int = 512  # the first part of the training, cheaper in attention
    long_share: float = 0.2  # the last part, at the full context
    warmup_share: float = 0.02
    decay_share: float = 0.5
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    weight_decay: float = 0.01
    threads: int = 2
    seed: int = 1


def corpus() -> tuple[list[bytes], list[bytes]]:
    """Return the standard library's files, split into training and held-out (4 %) by a hash of the path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    train: list[bytes] = []
    held: list[bytes] = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if EXCLUDED & set(relative.parts) or path.stat().st_size < 256:
            continue
        text = path.read_bytes()
        try:
            text.decode()
        except UnicodeDecodeError:
            continue
        chosen = hashlib.sha256(relative.as_posix().encode()).digest()[0] < 10
        (held if chosen else train).append(text)
    return train, held


def make_tokenizer(texts: list[bytes], vocab: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text.decode() for text in texts), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[bytes]) -> torch.Tensor:
    end = tokenizer.token_to_id(END)
    ids: list[int] = []
    for encoding in tokenizer.encode_batch([text.decode() for text in texts]):
        ids.append(end)
        ids.extend(encoding.ids)
    ids.append(end)
    return torch.tensor(ids, dtype=torch.int32)


def learning_rate(schedule: TrainingSchedule, done: float) -> float:
    """Return the factor at share `done` of the budget: warm-up, plateau, linear decay to zero."""
    if done < schedule.warmup_share:
        return max(0.05, done / schedule.warmup_share)
    return min(1.0, max(0.0, (1.0 - done) / schedule.decay_share))


@torch.no_grad()
def bits_per_byte(model: LlamaForCausalLM, ids: torch.Tensor, nbytes: int, context: int, limit: int) -> float:
    """Return the mean loss, in bits a byte, over the first `limit` tokens in windows of `context`."""
    total, count = 0.0, 0
    windows = ids[: limit + 1]
    for start in range(0, len(windows) - 1, context):
        window = windows[start : start + context + 1].long()[None]
        loss = model(input_ids=window, labels=window, use_cache=False).loss
        total += float(loss) * (window.shape[1] - 1)
        count += window.shape[1] - 1
    return total / math.log(2) / count * (len(ids) / nbytes)


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised updates (Newton-Schulz), in float32.

    torch.optim.Muon does the same in bfloat16, which takes half of each step on a processor without it.
    """

    def __init__(self, params: list[torch.nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                velocity = self.state[p].setdefault("velocity", torch.zeros_like(p))
                velocity.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonal(p.grad.lerp(velocity, group["momentum"]))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


def orthogonal(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Return roughly the nearest (semi-)orthogonal matrix, by a quintic Newton-Schulz iteration."""
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = wide / (wide.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def optimizers(model: LlamaForCausalLM, schedule: TrainingSchedule) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        Muon(matrices, schedule.muon_lr, schedule.weight_decay),
        torch.optim.AdamW(rest, lr=schedule.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


CurvePoint = tuple[int, int, float, float, float | None]  # step, tokens, minutes, loss, held-out bits a byte


@dataclass(slots=True, kw_only=True)
class Trained:
    """A model after training: its curve, and the steps and tokens that it took."""

    curve: list[CurvePoint]
    steps: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Token ids of files that are not trained on, and the files' size."""

    ids: torch.Tensor
    nbytes: int


def make_model(shape: ModelShape, tokenizer: Tokenizer) -> LlamaForCausalLM:
    """Return an untrained model with the tokenizer's vocabulary."""
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(END),
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).train()


def run_steps(
    model: LlamaForCausalLM, ids: torch.Tensor, held: HeldOut, shape: ModelShape, schedule: TrainingSchedule
) -> Trained:
    """Train the model in place until the schedule's time is over."""
    compiled = torch.compile(model)
    steppers = optimizers(model, schedule)
    base = [[group["lr"] for group in stepper.param_groups] for stepper in steppers]
    generator = torch.Generator().manual_seed(schedule.seed)
    started, step, seen = time.monotonic(), 0, 0
    curve: list[CurvePoint] = []
    while (done := (time.monotonic() - started) / (schedule.minutes * 60)) < 1.0:
        context = shape.context if done > 1 - schedule.long_share else schedule.short_context
        rows = schedule.batch_tokens // context
        starts = torch.randint(0, len(ids) - context - 1, (rows,), generator=generator)
        batch = torch.stack([ids[int(s) : int(s) + context] for s in starts]).long()
        loss = compiled(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update(steppers, base, learning_rate(schedule, done))
        step, seen = step + 1, seen + batch.numel()
        if step % 50 == 0:
            minutes = (time.monotonic() - started) / 60
            held_now = None
            if step % 250 == 0:
                model.eval()
                held_now = bits_per_byte(model, held.ids, held.nbytes, shape.context, 60_000)
                model.train()
            curve.append((step, seen, minutes, float(loss.detach()), held_now))
            log(
                f"{done:4.0%} step {step} {seen / 1e6:.2f}M tokens loss {float(loss.detach()):.3f}"
                + (f" held-out {held_now:.3f} bits/byte" if held_now else "")
            )
    return Trained(curve=curve, steps=step, tokens=seen)


def update(steppers: list[torch.optim.Optimizer], base: list[list[float]], factor: float) -> None:
    """Run the optimizers once, at `factor` times their base learning rates."""
    for stepper, rates in zip(steppers, base, strict=True):
        for group, rate in zip(stepper.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        stepper.step()
        stepper.zero_grad(set_to_none=True)


def train(shape: ModelShape, schedule: TrainingSchedule, out: Path) -> None:
    """Train a model and write it with the record of the run to `out`."""
    torch.manual_seed(schedule.seed)
    torch.set_num_threads(schedule.threads)
    train_texts, held_texts = corpus()
    tokenizer = make_tokenizer(train_texts, shape.vocab)
    ids = encode(tokenizer, train_texts)
    held = HeldOut(ids=encode(tokenizer, held_texts), nbytes=sum(map(len, held_texts)))
    train_bytes = sum(map(len, train_texts))
    log(
        f"corpus: {len(train_texts)} files, {train_bytes / 1e6:.1f} MB, {len(ids) / 1e6:.2f}M tokens; "
        f"held out: {len(held_texts)} files, {held.nbytes / 1e6:.2f} MB"
    )
    model = make_model(shape, tokenizer)
    parameters = sum(p.numel() for p in model.parameters())
    trained = run_steps(model, ids, held, shape, schedule)
    model = model.eval().to(torch.bfloat16)
    check = LlamaForCausalLM(model.config).eval()
    check.load_state_dict(model.float().state_dict())
    final = bits_per_byte(check, held.ids, held.nbytes, shape.context, len(held.ids))
    log(f"held-out: {final:.3f} bits/byte over {held.nbytes} bytes, {parameters} parameters")
    save(model.to(torch.bfloat16), tokenizer, out / "model")
    write_curve(trained.curve, out / "loss.csv")
    plot(trained.curve, out / "loss.png")
    record = {
        "held_out_bits_per_byte": round(final, 4),
        "held_out_bytes": held.nbytes,
        "train_bytes": train_bytes,
        "parameters": parameters,
        "steps": trained.steps,
        "tokens": trained.tokens,
        "processor_minutes": round(time.process_time() / 60, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "command": f"python functions/tiny-coder/train.py --minutes {schedule.minutes:g}",
        "shape": asdict(shape),
        "schedule": asdict(schedule),
    }
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n")


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def write_curve(curve: Sequence[CurvePoint], path: Path) -> None:
    """Write the curve as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "tokens", "minutes", "train_loss_nats_per_token", "held_out_bits_per_byte"])
        writer.writerows(
            (s, n, f"{m:.2f}", f"{lo:.4f}", "" if h is None else f"{h:.4f}") for s, n, m, lo, h in curve
        )


def plot(curve: Sequence[CurvePoint], path: Path) -> None:
    """Plot training loss and held-out bits a byte over the tokens seen."""
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(
        [n / 1e6 for _, n, _, _, _ in curve], [lo for _, _, _, lo, _ in curve], label="training, nats a token"
    )
    held = [(n / 1e6, h) for _, n, _, _, h in curve if h is not None]
    axes.plot(*zip(*held, strict=True), "o-", label="held out, bits a byte")
    axes.axhline(1.7, linestyle=":", color="grey", label="goal: 1.7 bits a byte")
    axes.set_xlabel("million tokens seen")
    axes.set_ylim(bottom=1.0)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config.do_sample = True
    model.save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": END,
                "eos_token": END,
                "model_max_length": model.config.max_position_embeddings,
                "clean_up_tokenization_spaces": False,
            },
            indent=2,
        )
        + "\n"
    )


def main() -> None:
    shape, schedule = ModelShape(), TrainingSchedule()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=schedule.minutes)
    parser.add_argument("--threads", type=int, default=schedule.threads)
    parser.add_argument("--vocab", type=int, default=shape.vocab)
    parser.add_argument("--batch-tokens", type=int, default=schedule.batch_tokens)
    parser.add_argument("--muon-lr", type=float, default=schedule.muon_lr)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    options = parser.parse_args()
    train(
        ModelShape(vocab=options.vocab),
        TrainingSchedule(
            minutes=options.minutes,
            threads=options.threads,
            batch_tokens=options.batch_tokens,
            muon_lr=options.muon_lr,
        ),
        options.out,
    )


if __name__ == "__main__":
    main()
