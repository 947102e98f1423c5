# The image of make image and make release, for those who build it with docker or buildah: after make build,
# docker build --build-arg VERSION=$(sed -n 's/^appVersion: *//p' deploy/chart/Chart.yaml) .
FROM scratch
ARG VERSION=
LABEL org.opencontainers.image.title="stayput" \
      org.opencontainers.image.description="A stateful pod comes back as it was, on the same node, with the same IP" \
      org.opencontainers.image.source="https://github.com/stayput/stayput" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
COPY bin/stayput bin/stayput-agent bin/stayput-controller /
