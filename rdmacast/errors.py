"""Exceptions of rdmacast.

CastError
├── AuthError         the peer does not know the cluster's secret
├── ProtocolError     the peer broke the wire format or a bound
├── LinkClosed        the connection is gone; reads under way end with this
├── RegionGone        the peer does not hold (or no longer holds) the region
├── ChecksumError     a unit arrived damaged from every holder (names the units)
└── NoHolder          no holder is left for the missing bytes (names them)
"""


class CastError(Exception):
    """Any failure of rdmacast."""


class AuthError(CastError):
    """The peer does not know the cluster's secret."""


class ProtocolError(CastError):
    """The peer broke the wire format or one of its bounds."""


class LinkClosed(CastError):
    """The connection to the peer is gone."""


class RegionGone(CastError):
    """The peer does not hold the region."""


class ChecksumError(CastError):
    """A unit arrived damaged from every holder."""


class NoHolder(CastError):
    """Nobody is left who holds the missing bytes."""
