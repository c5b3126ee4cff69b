"""``omni-bus keys``: make a deployment's keys for TCP, or those of a client that may connect to it."""

from __future__ import annotations

import argparse
from pathlib import Path

from omni_bus.bus.curve import ALLOWED, DEPLOYMENT, PUBLIC, SECRET, make_client_keys, make_deployment_keys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-command's arguments."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the deployment's keys; made if needed")
    parser.add_argument("--client", metavar="NAME", help="make the keys of this client, and allow it")
    parser.add_argument("--force", action="store_true", help="replace keys that are there")


def run(args: argparse.Namespace) -> int:
    """Write the keys and say what belongs where."""
    folder: Path = args.folder
    if args.client is None:
        make_deployment_keys(folder, may_replace=args.force)
        print(f"made {folder / DEPLOYMENT}{SECRET} and {PUBLIC}")
        print(f'the deployment: [security] key_folder = "{folder}", and bind = "tcp://ADDRESS" of this host')
        print("its other hosts: the same folder, copied over a safe way; the secret key must stay with mode 0600")
        print(f"a client: omni-bus keys {folder} --client NAME")
        return 0
    own = make_client_keys(folder, args.client, may_replace=args.force)
    allowed = folder / ALLOWED / f"{args.client}{PUBLIC}"
    print(f"made {own}, and allowed the client with {allowed}")
    print(f"the client's host: move {own} there over a safe way, and then")
    print(f"  omni-bus call --connect tcp://HOST:PORT --keys {args.client} TEXT")
    print(f"to cut it off: rm {allowed}")
    return 0
