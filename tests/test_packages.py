"""The files that say what to install say the same."""

import tomllib

from tests.helpers import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LOCK = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))


def packages(file: str) -> list[str]:
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith(("#", "-r "))]


def test_pip_and_uv_install_the_same_packages():
    assert packages("requirements.txt") == PROJECT["project"]["dependencies"]
    assert packages("requirements-test.txt") == PROJECT["dependency-groups"]["test"]


def test_the_lock_file_is_of_these_versions():
    locked = {package["name"]: package["version"] for package in LOCK["package"]}
    for requirement in PROJECT["project"]["dependencies"] + PROJECT["dependency-groups"]["test"]:
        name, version = requirement.split("==")
        assert locked[name.lower().replace("_", "-")] == version
