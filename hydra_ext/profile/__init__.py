"""What one microbatch costs, module by module, and where a model can be cut into segments."""

from hydra_ext.profile.cuts import balanced_cut, cuts_of
from hydra_ext.profile.dry_run import device_of, dry_run, dtype_of, faked
from hydra_ext.profile.figures import Amount, BlockFigures, ModuleFigures, Peaks, Profile

__all__ = [
    "Amount",
    "BlockFigures",
    "ModuleFigures",
    "Peaks",
    "Profile",
    "balanced_cut",
    "cuts_of",
    "device_of",
    "dry_run",
    "dtype_of",
    "faked",
]
