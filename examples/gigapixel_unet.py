"""Trains a U-Net on one photograph far larger than the device, in exact strips.

    python examples/gigapixel_unet.py --height 4096 --width 16384 --budget 1GiB --steps 3

The photographs are those that come with scikit-learn (`pip install 'hydra-ext[demo]'`), side by side and mirrored until
the image is full; the network is to tell their bright half from their dark one. `--check` runs the first step at once
as well, without strips, and `--check64` in fp64, where the host has memory for it.
"""

import argparse
import copy
import resource
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import hydra_ext


def convolution(inside: int, outside: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inside, outside, kernel, stride=stride, padding=kernel // 2)


def normalised(layer: nn.Module, channels: int = 3) -> nn.Sequential:
    return nn.Sequential(layer, nn.BatchNorm2d(channels), nn.ReLU(inplace=True))


class G1(nn.Module):
    """Three levels of three channels, batch normalisation, additive skips: 4,492 numbers with running statistics."""

    def __init__(self, stride: int = 4) -> None:
        super().__init__()
        self.recompute = False
        self.first = normalised(convolution(3, 3, 5))
        self.down = nn.ModuleList(
            nn.Sequential(normalised(convolution(3, 3, 7, stride)), normalised(convolution(3, 3, 5))) for _ in range(3)
        )
        self.up = nn.ModuleList(
            normalised(nn.ConvTranspose2d(3, 3, 7, stride, padding=3, output_padding=stride - 1)) for _ in range(3)
        )
        self.join = nn.ModuleList(normalised(convolution(3, 3, 5)) for _ in range(3))
        self.last = convolution(3, 1, 5)

    def stage(self, layers: nn.Module, x: torch.Tensor) -> torch.Tensor:
        # The same numbers from less host memory. Running statistics, which only evaluation reads, are updated twice.
        return checkpoint(layers, x, use_reentrant=False) if self.recompute else layers(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stage(self.first, x)
        skips = []
        for down in self.down:
            skips.append(x)
            x = self.stage(down, x)
        for up, join in zip(self.up, self.join, strict=True):
            x = self.stage(join, self.stage(up, x) + skips.pop())
        return self.last(x)


class G2(nn.Module):
    """One level, no normalisation, concatenated skip: 4,492 parameters."""

    def __init__(self, stride: int = 4) -> None:
        super().__init__()
        self.first = convolution(3, 7, 3)
        self.down = convolution(7, 8, 5, stride)
        self.middle = convolution(8, 8, 3)
        self.up = nn.ConvTranspose2d(8, 7, 5, stride, padding=2, output_padding=stride - 1)
        self.join = convolution(14, 7, 3)
        self.last = convolution(7, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = F.relu(self.first(x))
        x = F.relu(self.middle(F.relu(self.down(skip))))
        x = F.relu(self.join(torch.cat([skip, F.relu(self.up(x))], dim=1)))
        return self.last(x)


MODELS = {"g1": G1, "g2": G2}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def photographs(height: int, width: int) -> torch.Tensor:
    """scikit-learn's sample images tiled up to (1, 3, height, width), uint8."""
    from sklearn.datasets import load_sample_images

    pair = torch.cat([torch.from_numpy(photo.copy()) for photo in load_sample_images().images], dim=1)
    tile = torch.cat([pair, pair.flip(0)], dim=0)
    image = torch.empty(1, 3, height, width, dtype=torch.uint8)
    for top in range(0, height, tile.shape[0]):
        for left in range(0, width, tile.shape[1]):
            part = image[0, :, top : top + tile.shape[0], left : left + tile.shape[1]]
            part.copy_(tile[: part.shape[1], : part.shape[2]].permute(2, 0, 1))
    return image


def bright(pixels: torch.Tensor) -> torch.Tensor:
    """What the network is to find: 1 where the green channel is above 96 of 255."""
    return (pixels[:, 1:2] > 96).float()


def step(model: nn.Module, image: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Loss of one step; leaves the gradients on the parameters."""
    model.zero_grad()
    loss = F.binary_cross_entropy_with_logits(model(image), target)
    loss.backward()
    return loss.detach()


def at_once(model: nn.Module, pixels: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and gradients of a first step without strips."""
    model = copy.deepcopy(model).to(dtype)
    mean, std = (torch.tensor(values, dtype=dtype).view(-1, 1, 1) for values in (MEAN, STD))
    image = pixels.to(dtype).div_(255).sub_(mean).div_(std)
    loss = step(model, image, bright(pixels).to(dtype))
    return loss, [parameter.grad for parameter in model.parameters()]


def compare(args: argparse.Namespace, model: nn.Module, pixels: torch.Tensor, loss: float, made: list) -> None:
    begin = time.perf_counter()
    plain_loss, plain = at_once(model, pixels, torch.float32)
    seconds = time.perf_counter() - begin
    worst = max((a - b).abs().max().item() for a, b in zip(made, plain, strict=True))
    largest = max(gradient.abs().max().item() for gradient in plain)
    print(
        f"at once: loss {plain_loss.item():.9f} (strips {loss:.9f}, equal: {plain_loss.item() == loss}), "
        f"{seconds:.1f} s"
    )
    print(f"at once: largest difference of a gradient {worst:.2e}, largest gradient {largest:.2e}")
    if args.check64:
        exact_loss, exact = at_once(model, pixels, torch.float64)
        for name, gradients in (("strips", made), ("at once", plain)):
            errors = [(g.double() - e).norm() for g, e in zip(gradients, exact, strict=True)]
            relative = torch.stack(errors).norm() / torch.stack([e.norm() for e in exact]).norm()
            print(f"fp64: loss {exact_loss.item():.9f}; gradients of {name} are {relative.item():.2e} of all away")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--height", type=int, default=1024)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--budget", default="64MiB")
    parser.add_argument("--rows", type=int, help="the most rows of a strip; as many as the budget allows unless given")
    parser.add_argument("--device", help="'cuda' or 'simulated'; CUDA if there is one unless given")
    parser.add_argument("--model", choices=MODELS, default="g2")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--recompute", action="store_true", help="keep less on the host (g1)")
    parser.add_argument("--check", action="store_true", help="compare with a step without strips")
    parser.add_argument("--check64", action="store_true", help="and with one in fp64")
    args = parser.parse_args()
    if args.height % 64 or args.width % 64:
        parser.error("height and width have to be multiples of 64: three levels with a stride of 4")
    torch.manual_seed(0)
    pixels = photographs(args.height, args.width)
    target = bright(pixels)
    model = MODELS[args.model]()
    model.recompute = args.recompute
    before, first = copy.deepcopy(model), None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with hydra_ext.tiled.strips(budget=args.budget, rows=args.rows, device=args.device) as run:
        image = hydra_ext.tiled.image(pixels, mean=MEAN, std=STD)
        for number in range(args.steps):
            begin = time.perf_counter()
            loss = step(model, image, target).item()
            first = first or (loss, [parameter.grad.clone() for parameter in model.parameters()])
            optimizer.step()
            print(f"step {number + 1}: loss {loss:.6f}, {time.perf_counter() - begin:.1f} s", flush=True)
        print(run.report())
        print(f"host     peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB of the process")
    if args.check or args.check64:
        compare(args, before, pixels, *first)


if __name__ == "__main__":
    main()
