#!/usr/bin/env bash
# The trainer's key of the weight channel (weights.key), and the public one for generators (weights.env), in this folder.
set -euo pipefail
cd "$(dirname "$0")"
umask 077
rollstream keys new weights.key >/dev/null
echo "ROLLSTREAM_WEIGHTS__SERVER_PUBLIC_KEY=$(rollstream keys show weights.key)" >weights.env
