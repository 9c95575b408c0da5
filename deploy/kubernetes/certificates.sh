#!/bin/sh
# Make the certificates of certificates.yaml without cert-manager, for a year, in a folder:
#
#     sh certificates.sh FOLDER
#     kubectl apply -f FOLDER/secrets.yaml
#
# Keep FOLDER/ca.key away from the cluster. To renew, run it again with the same folder, apply, and restart Redis.
set -eu
umask 077

folder=$1
mkdir -p "$folder"
cd "$folder"
key="-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
if [ ! -e ca.key ]; then
    # shellcheck disable=SC2086
    openssl req -x509 $key -days 3650 -subj /CN=hypercast -keyout ca.key -out ca.crt
fi
: >secrets.yaml

# certificate SECRET NAMES USAGE
certificate() {
    printf 'subjectAltName=%s\nextendedKeyUsage=%s\nkeyUsage=digitalSignature\n' "$2" "$3" >extensions
    # shellcheck disable=SC2086
    openssl req $key -subj "/CN=$1" -keyout "$1.key" -out "$1.csr"
    openssl x509 -req -in "$1.csr" -CA ca.crt -CAkey ca.key -CAcreateserial -days 365 -extfile extensions -out "$1.crt"
    cat >>secrets.yaml <<SECRET
apiVersion: v1
kind: Secret
metadata:
  name: $1
  namespace: hypercast
  labels:
    app.kubernetes.io/part-of: hypercast
type: kubernetes.io/tls
data:
  ca.crt: $(base64 <ca.crt | tr -d '\n')
  tls.crt: $(base64 <"$1.crt" | tr -d '\n')
  tls.key: $(base64 <"$1.key" | tr -d '\n')
---
SECRET
}

service() {
    echo "DNS:$1,DNS:$1.hypercast,DNS:$1.hypercast.svc,DNS:$1.hypercast.svc.cluster.local"
}

certificate hypercast-gateway-tls "$(service hypercast-gateway)" serverAuth
certificate hypercast-node-tls DNS:hypercast-node serverAuth,clientAuth
certificate redis-tls "$(service redis)" serverAuth
rm extensions ./*.csr
echo "kubectl apply -f $folder/secrets.yaml"
