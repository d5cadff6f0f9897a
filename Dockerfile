# megatron_untied on an image that brings torch, CUDA, NCCL and attention kernels of its own.
#
#   docker build --tag megatron_untied .
#   docker run --gpus all --ipc=host --ulimit memlock=-1 megatron_untied bash examples/pretrain_8b_5m.sh
#
# NVIDIA's 26.07 has Python 3.12, torch 2.13, transformer-engine, apex and flash-attn. Another base:
# --build-arg BASE_IMAGE=..., with torch of the version in requirements.txt.
ARG BASE_IMAGE=nvcr.io/nvidia/pytorch:26.07-py3
FROM ${BASE_IMAGE}

WORKDIR /opt/megatron_untied
COPY requirements.txt tools/pin_torch.py /tmp/install/
# PIP_CONSTRAINT replaces NVIDIA's own list, which also holds packages that nothing was built
# against, at versions older than requirements.txt asks for.
RUN cd /tmp/install \
    && python pin_torch.py requirements.txt > constraints.txt \
    && cat constraints.txt \
    && grep -v '^torch==' requirements.txt > without_torch.txt \
    && PIP_CONSTRAINT=/tmp/install/constraints.txt PIP_BREAK_SYSTEM_PACKAGES=1 \
       pip install --no-cache-dir -r without_torch.txt

# A user whose runs/ is writable. With --user of your own choice, give a folder for results.
RUN useradd --create-home megatron && chown megatron:megatron .
COPY --chown=megatron:megatron . .
# In place and without dependencies, so nothing of the base can change, and its list need not hold.
RUN PIP_CONSTRAINT= PIP_BREAK_SYSTEM_PACKAGES=1 pip install --no-cache-dir --no-deps -e . \
    && chown -R megatron:megatron . \
    && rm -r /tmp/install
USER megatron

# No ENTRYPOINT: NVIDIA's checks the driver, sets up CUDA's forward compatibility, and passes the
# command on. A base without one runs the command as it is.
CMD ["bash"]
