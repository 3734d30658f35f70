"""Owns the profiles of AWS: keys, region and endpoint in the files that the AWS tools read."""

import configparser
import importlib
import os
from collections.abc import Mapping
from typing import Any

from holdfast.errors import UsageError

_NEED_BOTO3 = {"sso_session", "sso_start_url", "role_arn", "credential_process"}


def read_aws_profile(*, must_exist: bool) -> dict[str, str]:
    """The settings of the profile ``AWS_PROFILE``, or of "default", in the files that the AWS tools read.

    ``endpoint_url`` is that of S3, if the profile names one for this service.

    Raises:
        UsageError: It must exist, and ``AWS_PROFILE`` names a profile that is in none of them, or one of them
            is malformed.
    """
    name = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE") or "default"
    found: dict[str, str] = {}
    for variable, path, section in (
        ("AWS_CONFIG_FILE", "~/.aws/config", name if name == "default" else f"profile {name}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials", name),
    ):
        file = os.path.expanduser(os.environ.get(variable) or path)
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read(file)
        except (configparser.Error, UnicodeDecodeError) as error:
            if must_exist:
                raise UsageError(
                    f"{file}, in which AWS keeps its profiles, cannot be read: {error}"
                ) from error
        if parser.has_section(section):
            found |= dict(parser[section])
        of_s3 = parser.get(f"services {found.get('services')}", "s3", fallback="")
        lines = (line.partition("=") for line in of_s3.splitlines())
        found |= {key.strip(): value.strip() for key, _, value in lines if key.strip() == "endpoint_url"}
    if must_exist and not found and name != "default":
        raise UsageError(
            f"AWS_PROFILE is {name!r}, and ~/.aws/config and ~/.aws/credentials have no such profile"
        )
    return found


def boto3_credentials(url: str, profile: Mapping[str, str]) -> Any:
    """Credentials of a profile that is more than keys: SSO, roles, programs. None if it is not.

    Raises:
        UsageError: It is, and boto3 is not installed.
    """
    if not _NEED_BOTO3 & profile.keys():
        return None
    try:
        return importlib.import_module("obstore.auth.boto3").Boto3CredentialProvider()
    except ImportError as error:
        raise UsageError(
            f"{url}: the AWS profile has no keys but SSO, a role or a program, which needs boto3: "
            "pip install boto3. Or put keys into the environment."
        ) from error
