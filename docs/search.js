/* Search names as people write them. For the search library, "-" at the start of a word means "without
   this word", and "-" inside a word is a space. So a word that begins with "--", and a word with "_", "."
   or several "-", becomes one term, in which each "-" is escaped. `separator` in mkdocs.yml keeps such
   names of the pages whole. The term may be a part of a name: "micro_size" finds "batch.micro_size". */
const NAME = /^--\w|^\w+[_.]\w|^\w+-\w+-\w/;
const names = (query) => query.replace(/\S+/g, (word) => {
  const name = word.replace(/^-+|[^\w]+$/g, "");
  return NAME.test(word) && /^[\w.-]+$/.test(name) ? `*${name.replaceAll("-", "\\\\\\-")}` : word;
});

const post = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...rest) {
  const asks = typeof message?.data === "string";
  return post.call(this, asks ? { ...message, data: names(message.data) } : message, ...rest);
};
