// The site's search reads a hyphen before a word as "without"; a flag such as --weight-masks is looked for by its words.
document.addEventListener("input", (event) => {
  if (event.target.matches("[data-md-component=search-query]"))
    event.target.value = event.target.value.replace(/(^|\s)-+(?=\w)/g, "$1");
}, true);
