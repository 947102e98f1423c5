# Only the three static programs. deploy/ runs them; make image builds the image.
FROM scratch
ARG VERSION=
LABEL org.opencontainers.image.title="stayput" \
      org.opencontainers.image.description="A stateful pod comes back as it was, on the same node, with the same IP" \
      org.opencontainers.image.source="https://github.com/stayput/stayput" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
COPY bin/stayput bin/stayput-agent bin/stayput-controller /
