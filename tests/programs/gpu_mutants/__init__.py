"""Faults of the fused backend, each of which a test must catch: one table for each subject."""

from tests.programs.gpu_mutants.attention import ATTENTION_MUTANTS
from tests.programs.gpu_mutants.grammars import GRAMMAR_MUTANTS
from tests.programs.gpu_mutants.launches import LAUNCH_MUTANTS
from tests.programs.gpu_mutants.mutant import Mutant
from tests.programs.gpu_mutants.products import PRODUCT_MUTANTS
from tests.programs.gpu_mutants.ranks import RANK_MUTANTS
from tests.programs.gpu_mutants.sampling import SAMPLING_MUTANTS
from tests.programs.gpu_mutants.steps import STEP_MUTANTS

MUTANTS: tuple[Mutant, ...] = (
    *STEP_MUTANTS,
    *RANK_MUTANTS,
    *ATTENTION_MUTANTS,
    *LAUNCH_MUTANTS,
    *GRAMMAR_MUTANTS,
    *PRODUCT_MUTANTS,
    *SAMPLING_MUTANTS,
)
