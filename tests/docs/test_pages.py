"""README.md and docs/: their examples run as they are written, and what a newcomer asks is two clicks away."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

import hydra_ext
from hydra_ext import errors
from hydra_ext.errors import HydraError
from support import page_blocks
from support.page_blocks import ROOT, Page, PageError

PAGES = page_blocks.pages()
NOT_RUN = Path(__file__).with_name("not_run.txt")
LARGEST_README = (150, 7 * 1024)  # lines, bytes
STATUS_LINES = 10
FEWEST_PAGES = 30
# Seconds each: `make test-full` runs them.
LONG = {
    "README.md",
    "docs/guide/data-parallel.md",
    "docs/guide/does-my-model-fit.md",
    "docs/guide/fleet.md",
    "docs/guide/pipeline.md",
    "docs/reference/schedule-text.md",
}
# What a newcomer asks, as docs/index.md has it, and the page that answers it.
QUESTIONS = {
    "Does my model fit?": "guide/does-my-model-fit.md",
    "How do I use it with my loop?": "guide/your-loop.md",
    "What if it raises?": "guide/when-it-raises.md",
}
CLICKS = 2


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# ---- examples -------------------------------------------------------------------------------------------------------
@pytest.mark.every_case
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.full] if name_of(path) in LONG else []) for path in PAGES],
    ids=name_of,
)
def test_the_examples_of_a_page_run_and_print_what_it_shows(path: Path, tmp_path: Path) -> None:
    page = page_blocks.read(path)
    (page_blocks.run if page.ranks == 1 else page_blocks.run_on_ranks)(page, tmp_path)


def test_what_is_not_run_is_listed_with_its_reason() -> None:
    found = [line for path in PAGES for line in page_blocks.not_run(page_blocks.read(path))]
    assert NOT_RUN.read_text().splitlines() == found, (
        "python -m support.page_blocks --not-run > docs/not_run.txt, in tests/"
    )


def test_scripts_and_targets_that_pages_name_are_there() -> None:
    targets = set(re.findall(r"^([a-z][\w-]*)(?=.*?:)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    faults = []
    for path in PAGES:
        for block in page_blocks.read(path).blocks:
            if block.kind != "console":
                continue
            for line, command, _ in page_blocks.commands(block):
                scripts = re.findall(r"(?:\.\./)?[\w./]+\.py\b", command)
                folder = ROOT / "benchmarks" if command.startswith("cd benchmarks") else ROOT
                faults += [f"{name_of(path)}:{line}: {name}" for name in scripts if not (folder / name).exists()]
                if command.startswith("make "):
                    named = [word for word in command.split()[1:] if re.fullmatch(r"[a-z][\w-]*", word)]
                    faults += [f"{name_of(path)}:{line}: make {name}" for name in named if name not in targets]
    assert not faults


def written(text: str, folder: Path) -> Page:
    path = folder / "page.md"
    path.write_text(text)
    return page_blocks.read(path)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```python\nprint(1)\n```\n\n```output\n2\n```\n", "was printed"),
        ("```python\nprint(1)\n```\n\nwords\n\n```output\n1\n```\n", "without a python block"),
        ("```python\nprint('a 1')\n```\n\n<!-- numbers differ -->\n```output\nb 1\n```\n", "was printed"),
        ("```console\n$ python -c 'print(1)'\n2\n```\n", "was printed"),
        ("```console\n$ python -c 'raise SystemExit(3)'\n```\n", "ended with 3"),
        ("```\nx\n```\n", "a fence of ''"),
        ("    x\n", "an indented block"),
        ("<!-- set up -->\n", "an unknown comment"),
    ],
)
def test_a_page_that_says_something_else_fails(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(PageError, match=re.escape(message)):
        page_blocks.run(written(text, tmp_path), tmp_path)


def test_blocks_of_a_page_share_names_and_folder(tmp_path: Path) -> None:
    text = """
<!-- setup
x = 2
-->

```python
with open("file", "w") as file:
    file.write("3")
print(x, 1.5, "of", "1, 2, 3;")
```

<!-- numbers differ -->
```output
7 1,000 of 4;
```

```console
$ cat \\
  file
3
$ python -c 'print("a", "b")'
a ...
```

*Not run by the tests: it would raise.*

```python
raise ValueError
```
"""
    page = written(text, tmp_path)
    page_blocks.run(page, tmp_path)
    assert [block.not_run for block in page.blocks] == [None, None, None, "it would raise"]


# ---- README.md ------------------------------------------------------------------------------------------------------
def test_the_readme_is_short_and_begins_with_what_has_run_where() -> None:
    text = (ROOT / "README.md").read_text()
    lines, size = LARGEST_README
    assert len(text.splitlines()) <= lines
    assert len(text.encode()) <= size
    assert "never run on a GPU" in " ".join(text.splitlines()[:STATUS_LINES])


def test_the_example_of_the_readme_is_the_one_in_the_folder_of_examples() -> None:
    shown = next(block for block in page_blocks.read(ROOT / "README.md").blocks if block.kind == "python")
    assert shown.source in (ROOT / "examples" / "train_text.py").read_text()


# ---- the site -------------------------------------------------------------------------------------------------------
def links(path: Path) -> Iterator[tuple[str, str]]:
    """Text and target of a page's links, those of its tables of contents included."""
    text = path.read_text()
    for token in MarkdownIt().enable("table").parse(text):
        if token.type == "fence" and token.info.startswith("{toctree}"):
            names = [line.strip() for line in token.content.splitlines() if line.strip() and line[0] != ":"]
            yield from ((name, f"{name}.md") for name in names)
        children = token.children or []
        for first, inner in itertools.pairwise(children):
            if first.type == "link_open":
                yield inner.content, str(first.attrs["href"])


def anchors(path: Path) -> set[str]:
    """Of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings_that_are_there(path: Path) -> None:
    faults = [
        name for name in re.findall(r"\{repo\}`(?:[^`<]*<)?([^`>]+)>?`", path.read_text()) if not (ROOT / name).exists()
    ]
    for _, target in links(path):
        name, _, heading = target.partition("#")
        page = (path.parent / name).resolve() if name else path
        if not target.startswith(("http://", "https://")) and (
            not page.exists() or (heading and heading not in anchors(page))
        ):
            faults.append(target)
    assert not faults


def test_what_a_newcomer_asks_is_two_clicks_away() -> None:
    docs = ROOT / "docs"
    index = docs / "index.md"
    asked = dict(links(index))
    reached = {index}
    for _ in range(CLICKS):
        found = {(page.parent / target.partition("#")[0]).resolve() for page in reached for _, target in links(page)}
        reached |= {path for path in found if path.suffix == ".md" and path.is_file()}
    for question, page in QUESTIONS.items():
        assert asked[question] == page
        assert docs / page in reached
    far = set(docs.rglob("*.md")) - reached
    assert not far, "every page is two clicks from the first one"


def test_the_site_has_its_pages() -> None:
    assert len(list((ROOT / "docs").rglob("*.md"))) >= FEWEST_PAGES


def test_the_map_of_folders_names_each_of_them_once() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "develop" / "layout.md").read_text(), re.MULTILINE)
    named = [name.rstrip("/") for row in rows for name in re.findall(r"`([\w./]+)`", row)]
    folders = [
        path.relative_to(ROOT / place).as_posix()
        for place in ("csrc", "hydra_ext")
        for path in (ROOT / place).rglob("*")
        if path.is_dir() and path.name != "__pycache__"
    ]
    modules = [path.name for path in (ROOT / "hydra_ext").glob("*.py")]
    there = [name for name in (*folders, *modules) if name not in ("__init__.py", "__main__.py", "_build_info.py")]
    counts = {name: (there.count(name), named.count(name)) for name in there}
    assert not {name: both for name, both in counts.items() if len(set(both)) > 1}


# ---- docs/reference/errors.md ---------------------------------------------------------------------------------------
def literals() -> str:
    """The texts of the package's sources, as they are put together, with one character between them."""
    python = [
        node.value
        for path in (ROOT / "hydra_ext").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    joined = re.compile(r'"((?:[^"\\\n]|\\.)*)"(?:\s*"((?:[^"\\\n]|\\.)*)")*')
    cpp = [
        "".join(re.findall(r'"((?:[^"\\\n]|\\.)*)"', found[0]))
        for path in (ROOT / "csrc").rglob("*.cpp")
        for found in joined.finditer(path.read_text())
    ]
    return "\0".join([*python, *cpp])


def test_messages_in_the_table_of_errors_are_those_of_the_sources() -> None:
    texts = literals()
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(messages) > 50
    parts = [part for message in messages for part in message.split("…")]
    assert not [part for part in parts if part and part not in texts]


def test_every_error_has_its_section() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    classes = {
        each.__name__ for each in vars(errors).values() if isinstance(each, type) and issubclass(each, HydraError)
    }
    assert classes - set(re.findall(r"^### (\w+)$", page, re.MULTILINE)) == {"HydraError"}


# ---- docs/reference/api.md ------------------------------------------------------------------------------------------
def test_every_public_name_is_in_the_reference() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    modules = {
        "": hydra_ext,
        **{f"{each}.": getattr(hydra_ext, each) for each in ("codec", "optim", "schedule", "tiled")},
    }
    names = [f"{prefix}{name}" for prefix, module in modules.items() for name in module.__all__]
    names += hydra_ext._ON_FIRST_USE
    described = set(re.findall(r"^\.\. auto\w+:: hydra_ext\.([\w.]+)", page, re.MULTILINE))
    described |= {f"codec.{name}" for name in re.search(r"hydra_ext\.codec\n   :members: (.*)", page)[1].split(", ")}
    assert set(names) - described == {"__version__", "errors"}  # those have a page of their own
