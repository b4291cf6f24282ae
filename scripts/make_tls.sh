#!/usr/bin/env bash
# scripts/make_tls.sh FOLDER [NAME]: certificates with which the processes of one run prove themselves to one another.
#
# Makes FOLDER (mode 0700) with ca.pem, cert.pem and key.pem, good for 90 days. Every process uses the same three files:
#   python -m jaxstack.launch --tls FOLDER/cert.pem FOLDER/key.pem FOLDER/ca.pem \
#       --tls-peer-prefix spiffe://jaxstack/NAME/ ...
# The key of the certificate authority is thrown away: nobody can make another certificate that the run accepts.
set -euo pipefail
umask 077
folder=${1:?usage: scripts/make_tls.sh FOLDER [NAME]}
name=${2:-run}
mkdir -p "$folder"
scratch=$(mktemp -d "$folder/.making-XXXXXX")
trap 'rm -rf "$scratch"' EXIT
new_key=(-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes)

openssl req -x509 "${new_key[@]}" -days 90 -subj "/CN=jaxstack $name authority" \
    -keyout "$scratch/ca-key.pem" -out "$scratch/ca.pem" \
    -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign" 2> "$scratch/log" ||
    { cat "$scratch/log" >&2; exit 1; }
openssl req "${new_key[@]}" -subj "/CN=jaxstack $name" -keyout "$scratch/key.pem" -out "$scratch/request.pem" \
    2> "$scratch/log" || { cat "$scratch/log" >&2; exit 1; }
printf 'subjectAltName=URI:spiffe://jaxstack/%s/process\nextendedKeyUsage=serverAuth,clientAuth\n' "$name" \
    > "$scratch/extensions"
openssl x509 -req -in "$scratch/request.pem" -CA "$scratch/ca.pem" -CAkey "$scratch/ca-key.pem" -CAcreateserial \
    -days 90 -extfile "$scratch/extensions" -out "$scratch/cert.pem" 2> "$scratch/log" ||
    { cat "$scratch/log" >&2; exit 1; }
mv "$scratch/ca.pem" "$scratch/cert.pem" "$scratch/key.pem" "$folder/"
