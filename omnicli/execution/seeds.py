"""Seeds that belong to one item of one request, whatever else runs."""

from hashlib import blake2b


def row_seed(seed: int, request_id: str, stage: str, part: int) -> int:
    """A number of 63 bits that depends on nothing but its arguments."""
    name = f"{seed}\0{stage}\0{part}\0{request_id}".encode("utf-8", "surrogateescape")
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little") >> 1
