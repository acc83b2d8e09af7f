"""Splits an object store's options into those that Ray and Spark may keep, and those that only the fleet's processes have in memory.

Ray keeps the arguments of actors in its GCS, to restart them, and Spark keeps the functions that its tasks run. Neither may contain
credentials. So only options that are known to be no credentials are sent there. The values of all others are forwarded by calls between
running processes (:mod:`coordinator.storage.actor_store`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

#: Options of obstore's HTTP client. obstore panics if a store's configuration contains these names.
CLIENT_OPTIONS = (
    "allow_http",
    "allow_invalid_certificates",
    "connect_timeout",
    "default_content_type",
    "http1_only",
    "http2_keep_alive_interval",
    "http2_keep_alive_timeout",
    "http2_keep_alive_while_idle",
    "http2_only",
    "pool_idle_timeout",
    "pool_max_idle_per_host",
    "proxy_url",
    "proxy_ca_certificate",
    "proxy_excludes",
    "randomize_addresses",
    "read_timeout",
    "root_certificate",
    "timeout",
    "user_agent",
)
#: Prefix of a scheme's options where they are environment variables.
PREFIXES = {"s3": "aws_", "gs": "google_", "az": "azure_"}
#: Options that contain no credentials. Any other option may be a credential, as names vary.
NO_CREDENTIALS = frozenset(CLIENT_OPTIONS) | {
    "account_name",
    "bucket",
    "bucket_name",
    "checksum_algorithm",
    "conditional_put",
    "container_name",
    "copy_if_not_exists",
    "default_region",
    "disable_tagging",
    "endpoint",
    "endpoint_url",
    "imdsv1_fallback",
    "metadata_endpoint",
    "region",
    "request_payer",
    "s3_express",
    "single_writer",
    "skip_signature",
    "unsigned_payload",
    "use_emulator",
    "use_fabric_endpoint",
    "virtual_hosted_style_request",
}


@dataclass(frozen=True, slots=True)
class StorageOptions:
    """Options as they are sent in arguments of actors and in functions of Spark.

    Attributes
    ----------
    plain
        Names and values of options that are not credentials.
    withheld
        Names of the other options.
    """

    plain: tuple[tuple[str, str], ...] = ()
    withheld: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Secrets:
    """Values of withheld options. They are sent only in calls between the fleet's own processes, and ``repr`` does not show them."""

    values: tuple[tuple[str, str], ...] = field(default=(), repr=False)


def bare_name(option: str, scheme: str) -> str:
    """Return an option's name as obstore has it, without the prefix of the environment variable."""
    return option.lower().removeprefix(PREFIXES.get(scheme, ""))


def split_options(uri: str, storage_options: Mapping[str, str] | None) -> tuple[StorageOptions, Secrets]:
    """Return the options that may be sent, and the withheld values; a folder needs neither."""
    scheme = uri.partition(":")[0]
    options = {} if scheme == "file" else dict(storage_options or {})
    withheld = {name for name, value in options.items() if not _is_plain(bare_name(name, scheme), value)}
    plain = tuple(sorted((name, value) for name, value in options.items() if name not in withheld))
    return StorageOptions(plain, tuple(sorted(withheld))), Secrets(
        tuple((name, options[name]) for name in sorted(withheld))
    )


def _is_plain(name: str, value: object) -> bool:
    # A URL can hold a user's password, or a signature among its parameters.
    return name in NO_CREDENTIALS and isinstance(value, str) and not ("://" in value and ("@" in value or "?" in value))
