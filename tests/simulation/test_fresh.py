"""Fresh seeds: equal for one commit or source tree, different for another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation.fresh import LOWEST, fresh


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "src").mkdir(parents=True)
    (root / "src" / "one.py").write_text("one = 1\n")
    return root


class Git:
    """A `git` that reports `commit` as checked out in `root`: the machine need not have one."""

    def __init__(self, directory: Path, root: Path) -> None:
        self._script = directory / "git"
        self._root = root
        self.check_out("1" * 40)

    def check_out(self, commit: str) -> None:
        self._script.write_text(f"#!/bin/sh\necho '{self._root}'\necho {commit}\n")
        self._script.chmod(0o755)


@pytest.fixture
def git(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Git:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    return Git(tmp_path / "bin", tree)


@pytest.fixture
def without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")


@pytest.mark.usefixtures("git")
def test_seeds_of_a_commit_are_stable_and_name_it(tree: Path) -> None:
    found = fresh(50, tree)
    assert found == fresh(50, tree)
    assert list(found.seeds) == list(range(found.first, found.first + 50))
    assert found.first >= LOWEST
    assert str(found) == f"fresh seeds {found.first} to {found.first + 49}, derived from commit {'1' * 40}"


def test_different_commits_have_different_seeds(tree: Path, git: Git) -> None:
    before = fresh(50, tree)
    git.check_out("2" * 40)
    assert not set(before.seeds) & set(fresh(50, tree).seeds)


@pytest.mark.usefixtures("without_git")
def test_seeds_of_a_tree_without_git_depend_on_its_source(tree: Path) -> None:
    before = fresh(50, tree)
    assert before == fresh(50, tree)
    assert before.origin == "the contents of src (no git here)"
    (tree / "src" / "one.py").write_text("one = 2\n")
    assert fresh(50, tree).first != before.first


@pytest.mark.usefixtures("git")
def test_tree_inside_another_repository_counts_as_a_tree_without_git(tree: Path) -> None:
    inside = tree / "unpacked"
    (inside / "src").mkdir(parents=True)
    assert "no git" in fresh(50, inside).origin
