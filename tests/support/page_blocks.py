"""Runs the examples of a page of Markdown: `python -m support.page_blocks README.md docs/guide/offload.md ...`.

docs/develop/testing.md describes the marks of a page. The parser is the one that the site is built with. `--not-run`
lists the examples that are not run, each with its reason; tests/docs/not_run.txt has that list.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
# Linked into the folder that examples run in. hydra_ext is not linked, since it has no build; commands write to docs.
LINKED = ("benchmarks", "csrc", "examples", "tests", "tools")
COPIED = "docs"
SECONDS = 300  # for a command; one that hangs fails

COMMENT = re.compile(r"<!--\s*(setup|numbers differ|ranks:\s*(\d+))[ \t]*(?:\n(.*?))?\s*-->\s*", re.DOTALL)
NOT_RUN = re.compile(r"\*Not run by the tests: (.+?)\.?\*")
_NUMBER = r"\d+(?:,\d+)*(?:\.\d+)?(?:e[+-]?\d+)?"
# A list counts as one: how many blocks a rank holds depends on times, as a number does.
NUMBER = re.compile(rf"{_NUMBER}(?:, {_NUMBER})*")
SIZE = re.compile(r"\b0 [KMGT]iB(?: \(0 bytes\))?")  # with 0 for each number: which unit it has depends on it
# Commands that are not run, by their first word, and why.
ELSEWHERE = {
    "apt-get": "it changes the machine",
    "cd": "it leaves the folder of the page",
    "git": "it changes the clone",
    "make": "it builds or tests the clone",
    "pip": "it changes the environment",
    "source": "it changes the shell",
    "sudo": "it changes the machine",
}
# Commands run in this process, without a shell: a new process would import torch and transformers for seconds.
OWN_VERB = re.compile(r"(?:python -m hydra_ext|hydra-ext)((?: [\w./=,'-]+)*)")
SCRIPT = re.compile(r"python ((?:docs|examples)/[\w/]+\.py(?: [\w./=,'-]+)*)")
LANGUAGES = ("console", "cpp", "diff", "json", "output", "python", "text", "toml", "yaml")


@dataclass(frozen=True)
class Block:
    """A block of code, or a hidden setup.

    Attributes:
        kind: The language of the fence, or ``"setup"``.
        source: Its text.
        line: The line of the page that ``source`` begins at, from 1.
        expected: Output that the page shows for it; None if it shows none.
        numbers_differ: Whether numbers of the output are not compared.
        not_run: The page's reason why it is not run; None if it is run.
    """

    kind: str
    source: str
    line: int
    expected: str | None = None
    numbers_differ: bool = False
    not_run: str | None = None


@dataclass(frozen=True)
class Page:
    path: Path
    blocks: tuple[Block, ...]
    ranks: int = 1

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()


class PageError(Exception):
    """A page with an error in its marks, or an example with another result than the page shows."""

    def __init__(self, page: Path, line: int, message: str) -> None:
        super().__init__(f"{page}:{line}: {message}")


# ---- reading --------------------------------------------------------------------------------------------------------
def read(path: Path) -> Page:
    """Reads the blocks of a page.

    Raises:
        PageError: A fence without a known language, an indented block of code, or an output without its example.
    """
    tokens = [token for token in MarkdownIt().enable("table").parse(path.read_text()) if _counts(token)]
    blocks: list[Block] = []
    ranks = 1
    reason: str | None = None
    differ = False
    may_follow = False  # whether an output now belongs to the last block
    for token in tokens:
        line = token.map[0] + 1 if token.map else 1
        comment = COMMENT.fullmatch(token.content) if token.type == "html_block" else None
        if comment is not None and comment[1] == "setup":
            blocks.append(Block("setup", comment[3] or "", line + 1))
        elif comment is not None and comment[2]:
            ranks = int(comment[2])
        elif comment is not None:
            differ = True
            continue
        elif token.type == "html_block":
            raise PageError(path, line, f"an unknown comment: {token.content!r}")
        elif token.type == "code_block":
            raise PageError(path, line, "an indented block of code: fence it, with its language")
        elif token.type == "fence" and token.info.strip() == "output":
            if not may_follow:
                raise PageError(path, line, "an output without a python block directly before it")
            last = blocks.pop()
            blocks.append(Block(last.kind, last.source, last.line, token.content, differ, last.not_run))
        elif token.type == "fence" and not token.info.startswith("{"):
            if token.info.strip() not in LANGUAGES:
                raise PageError(path, line, f"a fence of {token.info!r}: one of {', '.join(LANGUAGES)}")
            blocks.append(Block(token.info.strip(), token.content, line + 1, None, differ, reason))
            may_follow, differ, reason = token.info.strip() == "python", False, None
            continue
        found = NOT_RUN.fullmatch(token.content) if token.type == "inline" else None
        reason = found[1] if found else None
        may_follow = differ = False
    return Page(path, tuple(blocks), ranks)


def _counts(token: Token) -> bool:
    return token.type in ("inline", "fence", "code_block", "html_block")


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands(block: Block) -> Iterator[tuple[int, str, str]]:
    """Returns the line, the command and the shown output of each command in a console block."""
    line, command, shown = block.line, "", list[str]()
    for number, text in enumerate(block.source.splitlines(), block.line):
        if command.endswith("\\"):
            command = command[:-1] + text.strip()
        elif text.startswith("$ "):
            if command:
                yield line, command, "\n".join(shown)
            line, command, shown = number, text[2:], []
        else:
            shown.append(text)
    if command:
        yield line, command, "\n".join(shown)


def is_elsewhere(command: str) -> bool:
    return shlex.split(command)[0] in ELSEWHERE


def not_run(page: Page) -> Iterator[str]:
    """Lists the examples of a page that are not run, with their reasons."""
    for block in page.blocks:
        if block.kind == "console":
            for _, command, _ in commands(block):
                first = shlex.split(command)[0]
                if block.not_run or first in ELSEWHERE:
                    yield f"{page.name}: {command}: {block.not_run or ELSEWHERE[first]}"
        elif block.not_run:
            yield f"{page.name}: {block.source.strip().splitlines()[0]}: {block.not_run}"


# ---- running --------------------------------------------------------------------------------------------------------
def same(expected: str, got: str, *, numbers_differ: bool) -> bool:
    """Whether an output is the one that a page shows, where ``...`` matches any text."""
    expected, got = (
        "\n".join(line.rstrip() for line in text.strip("\n").splitlines()).strip() for text in (expected, got)
    )
    if numbers_differ:
        expected, got = (SIZE.sub("0 bytes", re.sub(r"[ \t]+", " ", NUMBER.sub("0", text))) for text in (expected, got))
    pattern = ".*?".join(re.escape(part) for part in expected.split("..."))
    return re.fullmatch(pattern, got, re.DOTALL) is not None


def run(page: Page, folder: Path, *, rank: int = 0) -> None:
    """Runs all examples of a page in order, in ``folder``. Only rank 0 runs commands and compares.

    Raises:
        PageError: An output differs from the page, or a command fails.
    """
    if rank == 0:
        _furnish(page, folder)
    namespace = _names()
    with _inside(folder):
        for block in page.blocks:
            if block.not_run is None and block.kind in ("python", "setup"):
                _run_python(page, block, namespace, compared=rank == 0)
            elif block.not_run is None and block.kind == "console" and rank == 0:
                _run_commands(page, block, folder)


def _furnish(page: Page, folder: Path) -> None:
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    if any(f"{COPIED}/" in block.source for block in page.blocks if block.kind == "console"):
        shutil.copytree(ROOT / COPIED, folder / COPIED)


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Enters the folder, which also takes libraries' temporary files."""
    before, temporary = Path.cwd(), tempfile.tempdir
    with mock.patch.dict(os.environ, TMPDIR=str(folder)):
        os.chdir(folder)
        tempfile.tempdir = str(folder)
        try:
            yield
        finally:
            os.chdir(before)
            tempfile.tempdir = temporary


def _names() -> dict[str, Any]:
    import torch
    import torch.nn.functional as F
    from torch import nn

    import hydra_ext

    return {"__name__": "page", "torch": torch, "nn": nn, "F": F, "hydra_ext": hydra_ext}


def _run_python(page: Page, block: Block, namespace: dict[str, Any], *, compared: bool) -> None:
    code = compile("\n" * (block.line - 1) + block.source, str(page.path), "exec")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, namespace)
    if compared and block.expected is not None:
        _compare(page, block.line, block.expected, printed.getvalue(), block.numbers_differ)


def _run_commands(page: Page, block: Block, folder: Path) -> None:
    from hydra_ext.cli import main as cli

    tools = folder / ".tools"
    if not tools.exists():
        tools.mkdir()
        _write_tools(tools)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    for line, command, shown in commands(block):
        if is_elsewhere(command):
            continue
        verb, script = OWN_VERB.fullmatch(command), SCRIPT.fullmatch(command)
        if verb is not None:
            code, printed, told = _captured(partial(cli.run, shlex.split(verb[1])))
        elif script is not None:
            code, printed, told = _captured(partial(_run_script, shlex.split(script[1])))
        else:
            done = subprocess.run(
                ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS
            )
            code, printed, told = done.returncode, done.stdout, done.stderr
        if code != 0:
            raise PageError(page.path, line, f"`{command}` ended with {code}: {told[-2000:]}")
        if shown:
            _compare(page, line, shown, printed, block.numbers_differ)


def _run_script(words: Sequence[str]) -> int:
    path = Path(words[0]).resolve()
    search = [str(path.parent), *sys.path]
    with mock.patch.object(sys, "argv", [str(path), *words[1:]]), mock.patch.object(sys, "path", search):
        runpy.run_path(words[0], run_name="__main__")
    return 0


def _captured(body: Callable[[], int]) -> tuple[int, str, str]:
    """Runs a command and returns its exit status, stdout and stderr."""
    printed, told = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(told):
        try:
            code = body()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
    return code, printed.getvalue(), told.getvalue()


def _write_tools(folder: Path) -> None:
    """Writes the commands of an environment with hydra_ext, since this environment may lack them."""
    python = shlex.quote(sys.executable)
    for name, module in (("python", ""), ("torchrun", "-m torch.distributed.run"), ("hydra-ext", "-m hydra_ext")):
        tool = folder / name
        tool.write_text(f'#!/bin/sh\nexec {python} {module} "$@"\n')
        tool.chmod(0o755)


def _compare(page: Page, line: int, expected: str, got: str, numbers_differ: bool) -> None:
    if not same(expected, got, numbers_differ=numbers_differ):
        raise PageError(page.path, line, f"the page shows\n{expected}\nand this was printed\n{got}")


def run_on_ranks(page: Page, folder: Path) -> None:
    """Runs the examples on each rank of a process group, which the page itself makes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(page.ranks)]
    command += ["-m", "support.page_blocks", "--folder", str(folder), str(page.path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(folder)}
    environment["PYTHONPATH"] = f"{ROOT / 'tests'}:{environment.get('PYTHONPATH', '')}"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, cwd=folder)
    if done.returncode != 0:
        raise PageError(page.path, 1, f"on {page.ranks} ranks: {done.stdout[-1000:]}{done.stderr[-4000:]}")


def _on_this_rank(page: Page, folder: Path) -> None:
    import torch.distributed as dist

    run(page, folder, rank=int(os.environ["RANK"]))
    if dist.is_initialized():
        dist.destroy_process_group()
    # Skips the interpreter's shutdown, in which gloo's threads may abort a process that has succeeded.
    sys.stdout.flush()
    os._exit(0)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=lambda text: Path(text).resolve(), help="pages to run; default: all")
    parser.add_argument("--not-run", action="store_true", help="list examples that are not run, with their reasons")
    parser.add_argument("--folder", type=Path, help="folder to run in; this process is one of a page's ranks")
    options = parser.parse_args(arguments)
    chosen = [read(path) for path in options.pages or pages()]
    if options.not_run:
        print("\n".join(line for page in chosen for line in not_run(page)))
        return 0
    if options.folder is not None:
        _on_this_rank(chosen[0], options.folder)
    for page in chosen:
        with tempfile.TemporaryDirectory() as folder:
            (run if page.ranks == 1 else run_on_ranks)(page, Path(folder))
        print(f"{page.name}: {sum(block.kind in ('python', 'console') for block in page.blocks)} blocks", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
