"""The one text of a certificate, its digest, and its signature by an Ed25519 key.

May import: its folder, checkpoint and below. Privacy depends on it: no.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpfunc._utils.validation import fail, hex_digits
from dpfunc.errors import InvalidArgument

ALGORITHM = "Ed25519"
_SIGNED = {"public_key": 64, "value": 128}  # hexadecimal digits of each
_NEEDED = 'Signatures need the package cryptography: pip install "dpfunc[sign]".'


def canonical(values: Mapping[str, Any]) -> str:
    """The one text of these values: names sorted, and each number as Python writes it."""
    return json.dumps(values, sort_keys=True, indent=1, allow_nan=False) + "\n"


def digest_of(values: Mapping[str, Any]) -> str:
    """The digest of these values, apart from one that is among them."""
    plain = {name: value for name, value in values.items() if name != "digest"}
    return hashlib.sha256(canonical(plain).encode()).hexdigest()


def signed(values: Mapping[str, Any], private_key: Path) -> dict[str, str]:
    """The signature of these values by a key."""
    key = _read_key("private", private_key)
    public, value = key.public_key().public_bytes_raw(), key.sign(canonical(values).encode())
    return {"algorithm": ALGORITHM, "public_key": public.hex(), "value": value.hex()}


def signature_of(given: Mapping[str, Any]) -> dict[str, str]:
    """The fields of a signature, in their form."""
    return {"algorithm": ALGORITHM, **{name: hex_digits(name, given[name], length) for name, length in _SIGNED.items()}}


def signed_by(signature: Any, content: bytes, public_key: Path | str | None) -> tuple[bool, str]:
    """True if a content has this signature, by the given key or else by the one beside it; and what was found."""
    given = None if public_key is None else _read_key("public", Path(public_key)).public_bytes_raw()
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError:
        return False, f"not checked. {_NEEDED}"
    try:
        beside = bytes.fromhex(signature["public_key"])
        Ed25519PublicKey.from_public_bytes(given or beside).verify(bytes.fromhex(signature["value"]), content)
    except (InvalidSignature, ValueError):
        return False, "not of this content and key"
    if given is None:
        return True, f"by {beside.hex()}; whose key that is was not checked: --public-key"
    return beside == given, f"by {given.hex()}"


def _read_key(kind: str, path: Path) -> Any:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    except ImportError as error:
        raise InvalidArgument(_NEEDED) from error
    private, domain = kind == "private", f"an Ed25519 {kind} key"
    hint = ", without a password: openssl genpkey -algorithm ed25519 -out key.pem" if private else ""
    try:
        text = path.read_bytes()
        key: object = (
            serialization.load_pem_private_key(text, password=None)
            if private else serialization.load_pem_public_key(text)
        )  # fmt: skip
    except (OSError, ValueError, TypeError) as error:
        raise InvalidArgument(f"Expected {domain} (PEM{hint}) in {str(path)!r}: {error}.") from error
    if not isinstance(key, Ed25519PrivateKey if private else Ed25519PublicKey):
        raise fail(domain, f"{kind}_key", type(key).__name__)
    return key
