"""What one microbatch costs, module by module, and where a model can be cut into segments."""

from hydra_ext.profile.cuts import cuts_of
from hydra_ext.profile.figures import Amount, BlockFigures, ModuleFigures, Profile

__all__ = ["Amount", "BlockFigures", "ModuleFigures", "Profile", "cuts_of"]
