"""Prune a language model after its training: load it from a folder, calibrate, evaluate, save, export and measure it.

    python examples/prune_language_model.py --model FOLDER --text FILE --method sparsegpt --sparsity 0.5

FOLDER holds a causal language model of Hugging Face with its tokenizer, FILE a text like those it was trained on: nine
tenths of it are for calibration, the rest for the perplexity. Without --model the script trains a small Llama itself,
on the bytes of a text that every Python has, so that nothing is downloaded.
"""

import argparse
import inspect
import math
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

import pomona as pm

METHODS = {"magnitude": pm.posttraining.Magnitude, "wanda": pm.Wanda, "sparsegpt": pm.SparseGPT}


def main() -> None:
    """Load, prune, evaluate, save, export and measure a model."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="the folder of a causal language model")
    parser.add_argument("--text", type=Path, help="a text file for calibration and evaluation")
    parser.add_argument("--method", choices=METHODS, default="sparsegpt")
    parser.add_argument("--sparsity", type=float, help="by default that which the pattern fixes, else 0.75")
    parser.add_argument("--pattern", default="balanced(32)")
    parser.add_argument("--format", default="csr", help="that of the exported file, as pm.export takes it")
    parser.add_argument("--windows", type=int, default=64, help="windows of text for the calibration")
    parser.add_argument("--tokens", type=int, default=64, help="tokens in a window")
    parser.add_argument("--steps", type=int, default=300, help="training steps, where no model is given")
    parser.add_argument("--out", type=Path, default=Path("sparse-llama"))
    options = parser.parse_args()
    try:
        prune(options)
    except (pm.PomonaError, OSError) as error:
        parser.error(str(error))


def prune(options: argparse.Namespace) -> None:
    """Load, prune, evaluate, save, export and measure a model, by the options of the command line."""
    torch.manual_seed(0)
    pattern = pm.patterns.PATTERNS.resolve(options.pattern)
    sparsity = (pattern.sparsity or 0.75) if options.sparsity is None else options.sparsity
    method = METHODS[options.method](sparsity, pattern=pattern)
    require(options.windows >= 1, f"--windows must be 1 or more, got {options.windows}")
    text = read_text(options.text) if options.text else inspect.getsource(argparse)
    folder = options.model or train_small_model(text, options)
    require((Path(folder) / "config.json").exists(), f"--model {folder} is no folder with a config.json")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), load_tokenizer(folder)
    windows = split_windows(tokenize(tokenizer, text), options.tokens)
    calibration, test = windows[: len(windows) * 9 // 10], windows[len(windows) * 9 // 10 :]
    dense = perplexity(model, test)

    data = [{"input_ids": part} for part in calibration[: options.windows].split(8)]
    report = method.prune(model, data)
    print(f"{report.summary}\nperplexity: dense {dense:.2f}, pruned {perplexity(model, test):.2f}")

    model.save_pretrained(options.out)
    if tokenizer is not None:
        tokenizer.save_pretrained(options.out)
    again = AutoModelForCausalLM.from_pretrained(options.out)  # transformers alone
    assert perplexity(again, test) == perplexity(model, test)

    cost = pm.summary(model, {"input_ids": test[:1]})
    print(f"MACs for {options.tokens} tokens: {cost.macs:,}, without those of zeros {cost.macs_left:,}")
    file = options.out / "packed.safetensors"
    print(pm.export(model, file, options.format, example={"input_ids": test[:1]}, note=print))


def require(condition: bool, message: str) -> None:
    """Raise PomonaError with a message unless a condition holds."""
    if not condition:
        raise pm.PomonaError(message)


def read_text(path: Path) -> str:
    """Return the text of a file, or raise PomonaError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise pm.PomonaError(f"--text {path} cannot be read: {error}") from error


def load_tokenizer(folder: str) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a folder, or None where there is none."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    found = any((Path(folder) / name).exists() for name in names)
    return AutoTokenizer.from_pretrained(folder) if found else None


def tokenize(tokenizer: PreTrainedTokenizerBase | None, text: str) -> torch.Tensor:
    """Return the tokens of a text, or its bytes where there is no tokenizer."""
    ids = list(text.encode()) if tokenizer is None else tokenizer(text).input_ids
    return torch.tensor(ids)


def split_windows(tokens: torch.Tensor, size: int) -> torch.Tensor:
    """Return the windows of a text: nine tenths of them are for the calibration."""
    require(size >= 2, f"--tokens must be 2 or more, got {size}")
    count = len(tokens) // size
    require(count >= 10, f"the text has {count} windows of {size} tokens, fewer than 10: give a longer one")
    return tokens[: count * size].view(count, size)


def train_small_model(text: str, options: argparse.Namespace) -> str:
    """Train a small Llama on the bytes of a text, save it, and return its folder."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, bos_token_id=0, eos_token_id=0, **sizes))
    windows = split_windows(tokenize(None, text), options.tokens)
    tokens = windows[: len(windows) * 9 // 10].flatten()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(options.steps):
        starts = torch.randint(len(tokens) - options.tokens, (16, 1))
        windows = tokens[starts + torch.arange(options.tokens)]
        optimizer.zero_grad()
        mean_loss(model, windows).backward()
        optimizer.step()
    model.save_pretrained("dense-llama")
    return "dense-llama"


def mean_loss(model: torch.nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Return the mean negative log-likelihood of each token after the first one of its window."""
    return F.cross_entropy(model(input_ids=windows).logits[:, :-1].flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def perplexity(model: torch.nn.Module, windows: torch.Tensor) -> float:
    """Return the perplexity of some windows of text."""
    return math.exp(mean_loss(model.eval(), windows))


if __name__ == "__main__":
    main()
