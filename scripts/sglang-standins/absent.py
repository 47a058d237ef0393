"""Stand-ins for packages that SGLang imports but never runs on a CPU with PyTorch's own attention.

Every name and submodule of a stand-in imports. Whatever would compute raises when it is called, so that a path that
does need the package is not taken silently.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class Absent:
    """A name of a package that is not there."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._path}.{name}")

    def __call__(self, *args: object, **options: object) -> object:
        raise NotImplementedError(f"{self._path} is a stand-in: this path of SGLang needs the real package")

    def __getitem__(self, key: object) -> Absent:
        return self

    def __or__(self, other: object) -> type:
        return object  # in annotations: `Absent | None`

    __ror__ = __or__


class AbsentClass(type):
    """A class of such a package: to be named, subclassed and asked for members, not to be used."""

    def __getattr__(cls, name: str) -> Absent:
        if name.startswith("_"):
            raise AttributeError(name)
        return Absent(f"{cls.__name__}.{name}")


class AbsentModule(ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        is_class = name[:1].isupper()
        found = AbsentClass(name, (), {}) if is_class else Absent(f"{self.__name__}.{name}")
        setattr(self, name, found)
        return found


class Submodules(MetaPathFinder, Loader):
    """Every submodule of the package `root` that has no file."""

    def __init__(self, root: str) -> None:
        self._prefix = f"{root}."

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(self._prefix) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in(package: str) -> None:
    """Called by a stand-in's `__init__`: its missing names and submodules are there from now on."""
    sys.modules[package].__class__ = AbsentModule
    sys.meta_path.append(Submodules(package))
