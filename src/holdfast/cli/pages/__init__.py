"""The drawings of ``holdfast report``: pages of one HTML file each, without a script and without network."""
