"""Mutation testing: puts small faults into the package and the engine, and checks that the tests find them.

    python -m mutants --count 200 --seed 1     # `make mutants` sets up what this needs

This is a runner of our own, because mutmut and cosmic-ray do not fit. Both mutate sources in place or in a plain copy,
without a compiled extension beside them. Neither draws its mutants by a seed in proportion to lines. mutmut chooses
tests by function, with a trampoline in every function; functions that the tests interrupt line by line break under it.
cosmic-ray runs one command for every mutant, which here is a suite of a quarter of an hour. Neither supports C++.

Python mutants are drawn (:mod:`mutants.drawing`) from all changes that the operators can make to a source
(:mod:`mutants.operators`). Each is tried in a copy of the package, against the tests that execute its line
(:mod:`mutants.reach`), fastest first. The engine's mutants are a table (:mod:`mutants.engine_core`,
:mod:`mutants.engine_torch`), each with the tests to try first. All survivors together are put into one package, which
the whole suite tests. Every test that fails there is run against each survivor alone (:mod:`mutants.survivors`).

A stopped run continues where it was, and so does a later one. A result stays valid while two files do not change: the
mutated file, and that of the test that killed the mutant. A survivor's result depends on the files of all tests
(:mod:`mutants.results`).
"""
