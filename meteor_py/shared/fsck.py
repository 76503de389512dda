"""Consistency check of a shared group's state."""
from meteor_py.shared.protocol import SharedProtocol
def find_flaws(protocol: SharedProtocol) -> list[str]:
    protocol.require()
    return []
