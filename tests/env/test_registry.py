from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stepgym import Env, Task, make
from stepgym.env.registry import env_class, env_names, register_gymnasium, resolve_env_id
from stepgym.errors import UserError

_ENVS = '''
from stepgym import Task, ToolEnv

class Maze(ToolEnv):
    """A maze."""
    def __init__(self, *, width: int = 3, walls: tuple[str, ...] = ()):
        self.width, self.walls = width, walls
    def tasks(self, split):
        return [Task(id="1", prompt=f"width {self.width}")]
    def score(self):
        return 1.0
'''


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder that holds an installed distribution with environments, to be put on the path of a new process."""
    info = tmp_path / "mazes-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mazes\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[stepgym.envs]\n"
        "mazes/maze-v0 = mazes_env:Maze\nmazes/maze-v1 = mazes_env:Maze\n"
        "a/twin-v0 = mazes_env:Maze\nb/twin-v0 = mazes_env:Maze\n"
        "nameless = mazes_env:Maze\nmazes/broken-v0 = mazes_env:Missing\n"
    )
    (tmp_path / "mazes_env.py").write_text(_ENVS)
    return tmp_path


def python(folder: Path, code: str) -> list[str]:
    code = f"import sys; sys.path.insert(0, {str(folder)!r})\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()


def test_installed_environments_are_found_by_id_and_short_name(installed: Path) -> None:
    code = """
from stepgym.env.registry import env_names, resolve_env_id, env_class
from stepgym.errors import UserError
print([name for name in env_names() if not name.startswith("stepgym/")])
for name in ("maze", "mazes/maze", "mazes/maze-v0", "nameless", "twin", "maz", "broken"):
    try:
        print(resolve_env_id(name), env_class(name).__name__)
    except UserError as error:
        print(error)
"""
    lines = python(installed, code)
    assert json.loads(lines[0].replace("'", '"')) == [
        "a/twin-v0",
        "b/twin-v0",
        "mazes/broken-v0",
        "mazes/maze-v0",
        "mazes/maze-v1",
        "nameless",
    ]
    assert lines[1:5] == ["mazes/maze-v1 Maze", "mazes/maze-v1 Maze", "mazes/maze-v0 Maze", "nameless Maze"]
    assert lines[5].startswith("unknown environment 'twin'")
    assert lines[6].startswith("unknown environment 'maz'; did you mean 'maze'?")
    assert lines[7] == "environment 'broken': 'mazes_env' has no 'Missing'"


def test_gymnasium_makes_them_with_the_same_fields_and_no_wrappers(installed: Path) -> None:
    code = """
import gymnasium, stepgym
from stepgym.errors import UserError
env = gymnasium.make("mazes/maze-v1", width=5, walls=["a"])
print(type(env).__name__, env.walls, env.config, env.reset(seed=0)[0][0]["content"])
print(gymnasium.make("mazes/maze").spec.id)
for make in (gymnasium.make, stepgym.make):
    try:
        make("mazes/maze-v1", wdith=5)
    except UserError as error:
        print(error)
vector = gymnasium.make_vec("mazes/maze-v1", num_envs=2, vectorization_mode="sync", width=4)
print([observation[0]["content"] for observation in vector.reset(seed=0)[0]])
"""
    lines = python(installed, code)
    assert lines[0] == "Maze ('a',) {'width': 5, 'walls': ('a',)} width 5"
    assert lines[1] == "mazes/maze-v1"
    assert lines[2] == lines[3] == "env: unknown field 'wdith'; did you mean 'width'? Known: width, walls"
    assert lines[4] == "['width 4', 'width 4']"


class Local(Env):
    def __init__(self, *, size: int = 1) -> None:
        self.size = size

    def tasks(self, split: str) -> list[Task]:
        return [Task(id="1")]


def test_gymnasium_can_import_stepgym_itself(installed: Path) -> None:
    code = "import gymnasium; print(type(gymnasium.make('stepgym:mazes/maze-v1', width=2)).__name__)"
    assert python(installed, code) == ["Maze"]


def test_a_class_needs_no_registration() -> None:
    env = make(Local, size=2)
    assert isinstance(env, Local)
    assert env.config == {"size": 2}
    assert env_class("stepgym.env.base:Env") is Env
    assert resolve_env_id("some.module:Class") == "some.module:Class"
    with pytest.raises(UserError, match="Local: unknown field 'sise'; did you mean 'size'"):
        make(Local, sise=2)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("sqll", "unknown environment 'sqll'; did you mean 'sql'?"),
        ("nothing/like-this", "unknown environment 'nothing/like-this'"),
        ("no_such_module_x:Env", "there is no module 'no_such_module_x'"),
        ("json:loads", "is not a subclass of stepgym.Env"),
        ("json:JSONDecoder", "is not a subclass of stepgym.Env"),
        ("", "an environment's name is text"),
        (None, "an environment's name is text"),
    ],
)
def test_bad_names_are_one_line(name: str, problem: str) -> None:
    with pytest.raises(UserError) as caught:
        make(name)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_registering_twice_does_nothing() -> None:
    import gymnasium

    before = dict(gymnasium.registry)
    register_gymnasium()
    assert dict(gymnasium.registry) == before
    assert "stepgym/sql-v0" in env_names()
    assert resolve_env_id("sql") == "stepgym/sql-v0"
