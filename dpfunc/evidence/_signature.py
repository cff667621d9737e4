"""Ed25519 signatures of certificates, by the package `cryptography`: the extra `sign`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dpfunc._utils.validation import fail
from dpfunc.errors import InvalidArgument

_NEEDED = 'Signatures need the package cryptography: pip install "dpfunc[sign]".'


def sign(content: bytes, private_key: Path) -> dict[str, str]:
    """The signature of a content by the key in a PEM file, and its public key.

    Raises:
        InvalidArgument: no such file, no Ed25519 key in it, one with a password, or no package `cryptography`.
    """
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ImportError as error:
        raise InvalidArgument(_NEEDED) from error
    try:
        key = load_pem_private_key(private_key.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise InvalidArgument(
            f"Expected an Ed25519 private key (PEM, without a password) in {str(private_key)!r}: {error}. Make one by: "
            "openssl genpkey -algorithm ed25519 -out key.pem"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise fail("an Ed25519 private key", "private_key", type(key).__name__)
    public = key.public_key().public_bytes_raw().hex()
    return {"algorithm": "Ed25519", "public_key": public, "value": key.sign(content).hex()}


def signed_by(signature: Any, content: bytes, public_key: Path | None) -> tuple[bool, str]:
    """True if a content has this signature, by the given key or else by the one beside it; and what was found."""
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError as error:
        if public_key is not None:
            raise InvalidArgument(_NEEDED) from error
        return True, f"not checked. {_NEEDED}"
    given = None if public_key is None else _read_public(public_key)
    try:
        beside = bytes.fromhex(signature["public_key"])
        Ed25519PublicKey.from_public_bytes(given or beside).verify(bytes.fromhex(signature["value"]), content)
    except (InvalidSignature, ValueError, KeyError, TypeError):
        return False, "not of this content and key"
    if given is None:
        return True, f"by {beside.hex()}; whose key that is was not checked: --public-key"
    return beside == given, f"by {given.hex()}"


def _read_public(path: Path) -> bytes:
    """The bytes of an Ed25519 public key in a PEM file."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"Expected an Ed25519 public key (PEM) in {str(path)!r}: {error}.") from error
    if not isinstance(key, Ed25519PublicKey):
        raise fail("an Ed25519 public key", "public_key", type(key).__name__)
    return key.public_bytes_raw()
