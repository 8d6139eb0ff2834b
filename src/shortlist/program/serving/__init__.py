"""A trained run as a page and a JSON API: photos in, suggestions out, nothing kept."""
