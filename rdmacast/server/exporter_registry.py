"""The exporters of a region server, by the kind of the transport requests that they answer."""

from collections.abc import Iterable

from rdmacast.errors import NotShared
from rdmacast.exporter import Exporter, ExporterSession


class ExporterRegistry:
    """The transports by which peers may read from this node, besides TCP."""

    def __init__(self, exporters: Iterable[Exporter]) -> None:
        """Register the exporters. Raises ValueError if two have one name."""
        self._exporters: dict[str, Exporter] = {}
        for exporter in exporters:
            if exporter.name in self._exporters:
                raise ValueError(f"transport {exporter.name} has an exporter already")
            self._exporters[exporter.name] = exporter

    def __repr__(self) -> str:
        return f"ExporterRegistry({', '.join(self._exporters)})"

    def find(self, kind: str) -> Exporter:
        """Return the exporter of that name. Raises NotShared."""
        exporter = self._exporters.get(kind)
        if exporter is None:
            raise NotShared(f"this node does not export memory by {kind}")
        return exporter


class LinkExports:
    """The exporter sessions of one link, each opened by the first request of its kind."""

    def __init__(self, registry: ExporterRegistry) -> None:
        self._registry = registry
        self._sessions: dict[str, ExporterSession] = {}

    def __repr__(self) -> str:
        return f"LinkExports({', '.join(self._sessions)})"

    def session(self, kind: str) -> ExporterSession:
        """Return the session of that transport. Raises NotShared."""
        if kind not in self._sessions:
            self._sessions[kind] = self._registry.find(kind).session()
        return self._sessions[kind]

    def close(self) -> None:
        """Close every session; on return no peer reads any memory by them."""
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            session.close()
