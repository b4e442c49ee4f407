"""What `mkdocs.yml` needs to build the site from docs/ and the package; `make docs` runs it."""
