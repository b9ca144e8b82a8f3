#!/bin/sh
# Completions from a running server by curl.
#
#     sh examples/completions_curl.sh --base-url http://127.0.0.1:8000
set -eu
url=http://127.0.0.1:8000

post() { # post ROUTE BODY
    curl --silent --show-error --fail --no-buffer "$url$1" -H 'Content-Type: application/json' -d "$2"
    echo
}

main() {
    echo "Models:"
    curl --silent --show-error --fail "$url/v1/models"
    echo
    echo "One greedy continuation, with the log-probability of each token:"
    post /v1/completions '{"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "logprobs": 1}'
    echo "Two samples; the same seed gives the same two again:"
    post /v1/completions '{"prompt": "Once upon a time", "max_tokens": 24, "n": 2, "seed": 7}'
    echo "A stream that stops at the end of a sentence:"
    post /v1/completions '{"prompt": "Once upon a time", "max_tokens": 48, "stop": ".", "seed": 7, "stream": true}'
    echo "Token ids of a text:"
    post /tokenize '{"prompt": "Once upon a time"}'
}

while [ $# -gt 0 ]; do
    case $1 in
    --base-url) url=${2%/} && shift 2 ;;
    *) echo "usage: $0 [--base-url URL]" >&2 && exit 2 ;;
    esac
done
main
