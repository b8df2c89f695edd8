// Runs the search of the built documentation without a browser: node search.js HTML_FOLDER QUERY...
// Prints for each query a JSON list of pages, best first.
const fs = require("fs"), path = require("path"), vm = require("vm");
const [folder, ...queries] = process.argv.slice(2);
const read = (name) => fs.readFileSync(path.join(folder, name), "utf8");
const element = { addEventListener() {}, appendChild() {}, classList: { add() {} }, dataset: {} };
const context = vm.createContext({
  console,
  document: { addEventListener() {}, documentElement: element, createElement: () => element, getElementById: () => null, body: element },
  location: { search: "" },
  localStorage: { setItem() {}, getItem: () => null, removeItem() {} },
  DOCUMENTATION_OPTIONS: { LINK_SUFFIX: ".html", FILE_SUFFIX: ".html", SHOW_SEARCH_SUMMARY: false },
  URLSearchParams, SPHINX_HIGHLIGHT_ENABLED: false, _: (text) => text, _ready() {},
});
context.window = context; // language_data.js sets window.Stemmer
const sources = ["language_data.js", "searchtools.js"].map((name) => read(`_static/${name}`)).join("\n");
vm.runInContext(`${sources}\nglobalThis.Search = Search;`, context);
vm.runInContext(read("searchindex.js"), context);
for (const query of queries) {
  const parsed = context.Search._parseQuery(query);
  const results = context.Search._performSearch(...parsed);
  console.log(JSON.stringify(results.map((result) => result[0]).reverse().slice(0, 5)));
}
