"""What one microbatch costs, module by module, and where a model can be cut into segments."""

from hydra_ext.profile.cards import CARDS, Card, Speed
from hydra_ext.profile.cuts import cuts_of
from hydra_ext.profile.dry_run import dry_run
from hydra_ext.profile.figures import Amount, BlockFigures, ModuleFigures, Profile

__all__ = ["CARDS", "Amount", "BlockFigures", "Card", "ModuleFigures", "Profile", "Speed", "cuts_of", "dry_run"]
