# The program for CPUs, in one process:
#   docker build -t streambp .
#   docker run --rm -v "$PWD:/data" streambp train --data chats.jsonl --model Qwen3-0.6B --out tuned
FROM debian:bookworm-slim AS build
COPY scripts/setup.sh /setup.sh
RUN /setup.sh --program
COPY . /streambp
RUN cmake -S /streambp -B /build -DSTREAMBP_CUDA=OFF -DSTREAMBP_MPI=OFF -DSTREAMBP_TESTS=OFF \
 && cmake --build /build --target streambp -j "$(nproc)" \
 && cmake --install /build --component program --strip --prefix /installed

FROM debian:bookworm-slim
RUN apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends libedit2 libgomp1 libpcre2-8-0 libutf8proc2 libxxhash0 libzstd1 zlib1g \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build /installed/bin/streambp /usr/local/bin/streambp
WORKDIR /data
ENTRYPOINT ["streambp"]
