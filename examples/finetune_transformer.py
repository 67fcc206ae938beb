"""Fine-tune a pretrained transformer while it is pruned, and save it for `transformers`.

    python examples/finetune_transformer.py --sparsity 0.9 --epochs 10 --out sparse-vit

The pretrained model is a small vision transformer that the script trains on digits, so that nothing is downloaded. With
--model NAME it is a folder or a name from the Hub, for images of 8×8 pixels.
"""

import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForImageClassification, ViTConfig, ViTForImageClassification

import pomona as pm


def main() -> None:
    """Pretrain where no model is given, prune, save, and load the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="a folder or a name from the Hub")
    parser.add_argument("--sparsity", type=float, default=0.8)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--out", default="sparse-vit")
    options = parser.parse_args()

    torch.manual_seed(0)
    data = pm.data.load("digits")
    loader = DataLoader(TensorDataset(data.train.x.float() / 255, data.train.y), batch_size=64, shuffle=True)

    if options.model:
        model = AutoModelForImageClassification.from_pretrained(options.model)
    else:
        model = ViTForImageClassification(small_config())
        train(model, loader, torch.optim.AdamW(model.parameters(), lr=2e-3), epochs=5)
    print(f"dense: {accuracy(model, data.test):.1%}")

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    pruner = pm.DPF(sparsity=options.sparsity)
    pruner.attach(model, optimizer, total_steps=options.epochs * len(loader))
    train(model, loader, optimizer, options.epochs)
    pruner.finish()

    model.save_pretrained(options.out)
    again = AutoModelForImageClassification.from_pretrained(options.out)
    print(f"{pruner.sparsity():.0%} sparse: {accuracy(again, data.test):.1%}, saved in {options.out}")


def small_config() -> ViTConfig:
    """Return a vision transformer for images of 8×8 pixels."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    return ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=10, **sizes)


def train(model, loader, optimizer, epochs):
    """Train a model; it does not matter whether a pruner is attached to the optimizer."""
    model.train()
    for _ in range(epochs):
        for pixels, labels in loader:
            loss = model(pixel_values=pixels, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model, split):
    """Return the accuracy on a part of the data."""
    logits = model.eval()(pixel_values=split.x.float() / 255).logits
    return (logits.argmax(1) == split.y).float().mean().item()


if __name__ == "__main__":
    main()
