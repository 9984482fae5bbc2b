"""The objects of the cluster, by kind, namespace and name; what is owned goes with its owner."""

import threading
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

Made = dict[str, Any]
Key = tuple[str, str, str]


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Objects:
    """All objects. Whoever looks at several at once, or changes one, holds `lock`."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._made: dict[Key, Made] = {}

    def create(self, kind: str, namespace: str, made: Made) -> Made:
        """Keeps a new object. Raises `KeyError` where there is one of that name."""
        with self.lock:
            metadata = made.setdefault("metadata", {})
            key = (kind, namespace, metadata["name"])
            if key in self._made:
                raise KeyError(metadata["name"])
            metadata |= {"namespace": namespace, "uid": str(uuid.uuid4()), "creationTimestamp": now()}
            made.setdefault("status", {})
            self._made[key] = made
            return made

    def get(self, kind: str, namespace: str, name: str) -> Made | None:
        with self.lock:
            return self._made.get((kind, namespace, name))

    def all(self, kind: str, namespace: str | None = None) -> list[Made]:
        """Those of a kind, in the order in which they were made."""
        with self.lock:
            return [made for (of, where, _), made in self._made.items() if of == kind and namespace in (None, where)]

    def owned(self, owner: Made, kind: str) -> list[Made]:
        return [made for made in self.all(kind) if owner["metadata"]["uid"] in owners(made)]

    def remove(self, kind: str, made: Made) -> None:
        with self.lock:
            metadata = made["metadata"]
            self._made.pop((kind, metadata["namespace"], metadata["name"]), None)

    def orphans(self) -> Iterator[tuple[str, Made]]:
        """The objects whose owners are all gone."""
        with self.lock:
            there = {made["metadata"]["uid"] for made in self._made.values()}
            for (kind, _, _), made in list(self._made.items()):
                if owners(made) and not owners(made) & there:
                    yield kind, made


def owners(made: Made) -> set[str]:
    return {owner["uid"] for owner in made["metadata"].get("ownerReferences", ())}


def owned_by(owner: Made) -> list[Made]:
    """The owner references of an object that another one makes."""
    metadata = owner["metadata"]
    return [{"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": metadata["name"],
             "uid": metadata["uid"], "controller": True}]  # fmt: skip


def selected(made: Made, labels: str) -> bool:
    """True if an object has the labels that a request selects by."""
    own = made["metadata"].get("labels", {})
    return all(own.get(name) == value for name, _, value in (each.partition("=") for each in labels.split(",") if each))


def condition(made: Made, kind: str, status: str, reason: str, message: str) -> None:
    conditions = made["status"].setdefault("conditions", [])
    conditions[:] = [other for other in conditions if other["type"] != kind]
    conditions.append(
        {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": now()}
    )


def has(made: Made, *kinds: str) -> bool:
    """True if one of some conditions of an object is true."""
    return any(other["type"] in kinds and other["status"] == "True" for other in made["status"].get("conditions", ()))
