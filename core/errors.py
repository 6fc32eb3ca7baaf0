"""Every error that Octavo raises on purpose. A message says what happened, where, and what to do.

    OctavoError
    ├── ConfigError                  the settings cannot be used
    │   ├── UnknownPluginError       no plugin of that name is installed
    │   ├── InvalidOptionsError      an option is unknown, of a wrong type or out of range
    │   ├── IncompatibleStackError   the chosen plugins do not work together
    │   └── ResultError              a saved measurement cannot be read, or not be written there
    ├── PluginError                  an installed plugin is at fault
    │   ├── PluginLoadError          it cannot be imported or registers nothing
    │   ├── DuplicatePluginError     two distributions provide one name
    │   └── PluginContractError      it broke a promise of its interface
    ├── ModelSourceError             a model cannot be found, fetched, verified or read
    ├── RequestError                 one request cannot be served (HTTP 4xx); the engine goes on
    │   └── QueueFullError           too many wait already; later it may be served
    └── EngineError                  the engine cannot go on
        ├── EngineStuckError         nothing can be planned although requests wait
        └── OutOfMemoryError         device memory ran out

Must not know: torch, plugins, HTTP.
"""

from __future__ import annotations


class OctavoError(Exception):
    """Base of all errors that Octavo raises on purpose."""


class ConfigError(OctavoError):
    """The settings cannot be used as they are."""


class UnknownPluginError(ConfigError):
    """No installed plugin of this kind has the chosen name."""


class InvalidOptionsError(ConfigError):
    """An option is unknown, of a wrong type, or out of range."""


class IncompatibleStackError(ConfigError):
    """The chosen plugins do not work together, on this device or with this model."""


class ResultError(ConfigError):
    """A saved measurement is damaged, incomplete, of a newer version or of something else, or cannot be written there."""


class PluginError(OctavoError):
    """An installed plugin is at fault."""


class PluginLoadError(PluginError):
    """A plugin cannot be imported, has a misspelt hook, or registers nothing."""


class DuplicatePluginError(PluginError):
    """Two distributions provide a plugin of one kind under one name."""


class PluginContractError(PluginError):
    """A plugin broke a promise of its interface."""


class ModelSourceError(OctavoError):
    """A model cannot be found, fetched, verified or read."""


class RequestError(OctavoError):
    """One request cannot be served; the engine and all other requests go on.

    `field` names the offending field of the request, where one is to blame.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class QueueFullError(RequestError):
    """So many requests of its class wait that this one is not taken; later it may be."""


class EngineError(OctavoError):
    """The engine cannot go on."""


class EngineStuckError(EngineError):
    """Requests wait, yet the scheduler plans nothing and nothing is in flight."""


class OutOfMemoryError(EngineError):
    """Device memory ran out and preempting requests did not help."""
