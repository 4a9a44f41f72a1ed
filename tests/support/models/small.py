"""Small modules that a command line can name."""

from torch import Tensor, nn


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


class Reading(Small):
    """Chooses by a number, which only a real microbatch has."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if y.sum().item() > 0 else 2 * y
