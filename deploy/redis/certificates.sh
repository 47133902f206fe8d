#!/usr/bin/env bash
# Certificates for TLS to the Redis server: an authority of your own, and the server's certificate from it.
# Usage: deploy/redis/certificates.sh FOLDER HOST...   (names and addresses by which workers reach the server)
# Makes FOLDER/ca.crt, ca.key, server.crt and server.key; keep ca.key away from the server. Needs openssl 1.1.1 or newer.
set -euo pipefail

if (($# < 2)); then
    echo "error: usage: $0 FOLDER HOST..." >&2
    exit 2
fi
folder=$1
shift
if [[ -e $folder/ca.key ]]; then
    echo "error: $folder/ca.key is there already: remove it, or choose another folder" >&2
    exit 2
fi

names=()
for host in "$@"; do
    if [[ $host =~ ^[0-9.]+$|: ]]; then
        names+=("IP:$host")
    else
        names+=("DNS:$host")
    fi
done
alternatives=$(IFS=,; echo "${names[*]}")

umask 077
mkdir -p "$folder"
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 -subj "/CN=rollstream authority" \
    -addext "keyUsage=critical,keyCertSign,cRLSign" -keyout "$folder/ca.key" -out "$folder/ca.crt" 2>/dev/null
openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=$1" \
    -keyout "$folder/server.key" -out "$folder/server.csr" 2>/dev/null
openssl x509 -req -in "$folder/server.csr" -CA "$folder/ca.crt" -CAkey "$folder/ca.key" -CAcreateserial -days 825 \
    -extfile <(printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth\n' "$alternatives") -out "$folder/server.crt" 2>/dev/null
rm "$folder/server.csr" "$folder"/ca.srl
chmod 644 "$folder/ca.crt" "$folder/server.crt"
echo "$folder/ca.crt: for workers; $folder/server.crt and server.key: for the server"
