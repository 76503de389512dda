"""A parser that finds Redis protocol message boundaries in a byte stream, for the proxy."""


class Splitter:
    """Finds the ends of RESP2 and RESP3 requests or replies in data that arrives in pieces.

    Raises ValueError on bytes that violate the protocol.
    """

    def __init__(self) -> None:
        self._line = b""  # the beginning of an unfinished header line
        self._payload = 0  # bytes still missing from a bulk string, including its CRLF
        self._open: list[int] = []  # number of values missing from each open aggregate
        self._out_of_band = False  # inside a push message, which is not a reply

    def feed(self, data: bytes) -> list[int]:
        """Return the positions in `data` just after each message that ends in it."""
        ends = []
        position = 0
        while position < len(data):
            if self._payload:
                step = min(self._payload, len(data) - position)
                self._payload -= step
                position += step
                complete = self._payload == 0
            else:
                newline = data.find(b"\n", position)
                if newline < 0:
                    self._line += data[position:]
                    break
                line = self._line + data[position : newline + 1]
                self._line = b""
                position = newline + 1
                complete = self._header(line.strip())
            if complete and self._close_aggregates():
                if not self._out_of_band:
                    ends.append(position)
                self._out_of_band = False
        return ends

    def _header(self, line: bytes) -> bool:
        """Parse one line; return whether it is a complete value by itself."""
        if not line:
            return False  # an empty line between messages is a keep-alive
        kind = line[:1]
        if kind in b"$=!":
            size = int(line[1:])
            self._payload = size + 2 if size >= 0 else 0
            return size < 0
        if kind in b"*~>%|":
            self._out_of_band = self._out_of_band or (kind == b">" and not self._open)
            values = int(line[1:]) * (2 if kind in b"%|" else 1)
            # Attributes precede the value they describe: both together are one message.
            values += kind == b"|"
            if values > 0:
                self._open.append(values)
            return values <= 0
        return True  # a simple reply, or a request typed as a line

    def _close_aggregates(self) -> bool:
        """Count a complete value; return whether the whole message is complete."""
        while self._open:
            self._open[-1] -= 1
            if self._open[-1]:
                return False
            self._open.pop()
        return True
