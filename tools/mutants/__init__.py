"""Mutation testing: small faults are put into the package and the engine, and the tests are asked to find them.

    python -m mutants --count 200 --seed 1     # `make mutants` sets up what this needs

A runner of our own, because neither mutmut nor cosmic-ray does what is needed here. Both mutate sources in place or in
a plain copy and know no compiled extension beside them; neither draws its mutants by a seed in proportion to lines;
mutmut chooses tests by function through a trampoline in every function, which bodies that the tests interrupt line by
line do not survive, and cosmic-ray runs one command for every mutant, here a suite of a quarter of an hour. Neither
knows C++.

Python mutants are drawn (:mod:`mutants.drawing`) from all that the operators make of a source
(:mod:`mutants.operators`). Each is tried in a copy of the package, against the tests that execute its line
(:mod:`mutants.reach`), fastest first. The engine's are a table (:mod:`mutants.engine_core`,
:mod:`mutants.engine_torch`), each with the tests to try first. Whatever survives is put into one package and meets the
whole suite: every test that fails there is run against each survivor by itself (:mod:`mutants.survivors`).

A stopped run goes on where it was, and a later one, too: a result is kept while the mutated file stands, and the file
of the test that killed it or, of a survivor, the whole suite (:mod:`mutants.results`).
"""
