// The page: what is asked is either an image of the index (in the address, so that it can be kept) or a file (kept in memory).

const $ = (id) => document.getElementById(id);
const MOST = 24;
let about = { runs: [], most_bytes: Infinity };
const uploads = []; // files that were asked with, by their place in the history
let offset = 0;
let latest = 0; // number of the newest question: answers to older ones are dropped

async function call(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Error("The server does not answer: see whether xbm serve is still running.");
  }
  const answer = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(sentence(answer.error || `The server answered ${response.status}.`));
  return answer;
}

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
const query = (values) => {
  const told = Object.entries(values).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return new URLSearchParams(told.flatMap(([name, value]) => [value].flat().map((each) => [name, each])));
};
const thumbnail = (run, id) => `/api/thumbnails/${run}/${id}`;
const named = (image) => image.label || image.path;
const minus = (number) => number.toFixed(3).replace("-", "−");
const plural = (count, one, many) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;

// ------------------------------------------------------------------ asking

const NOTHING = { like: null, run: 0, upload: null, text: null };
const state = () => history.state || NOTHING;
const label = () => $("label").value.trim();
const where = () => $("where").value.trim();
const filter = () => where().split(/\s+and\s+/).filter(Boolean); // price<=20 and color=red

function address({ like, run, text }) {
  const keep = query({ like, run: like === null ? null : run, text, label: label(), where: where() });
  return keep.size ? `/?${keep}` : "/";
}

function go(next) {
  history.pushState(next, "", address(next));
  return show(true);
}

function ask(file) {
  if (file.size > about.most_bytes) {
    const size = (file.size / 1e6).toFixed(1);
    history.pushState(NOTHING, "", address(NOTHING));
    fail(new Error(`${file.name || "The image"} has ${size} MB: give one of at most ${about.most_bytes / 1e6} MB.`));
    return;
  }
  uploads.push(file);
  go({ ...NOTHING, upload: uploads.length - 1 });
}

async function show(moved = false) {
  const number = ++latest, { like, run, upload, text } = state();
  const file = upload === null ? null : uploads[upload];
  $("error").textContent = "";
  $("text").value = text || "";
  if (like === null && !file && !text) {
    clear();
    await browse();
    return;
  }
  const waiting = setTimeout(() => { $("status").textContent = "Searching …"; }, 300);
  $("results").setAttribute("aria-busy", "true");
  try {
    let answer;
    if (file) {
      const body = new FormData();
      body.append("image", file);
      answer = await call(`/api/search?${query({ top: MOST, label: label(), filter: filter() })}`, { method: "POST", body });
    } else {
      answer = await call(`/api/search?${query({ like, text, run, top: MOST, label: label(), filter: filter() })}`);
    }
    if (number === latest) draw(answer, file, run, moved, text);
  } catch (error) {
    if (number !== latest) return;
    history.replaceState(NOTHING, "", address(NOTHING)); // what failed is not asked again when the label changes
    fail(error);
  } finally {
    clearTimeout(waiting);
    $("results").removeAttribute("aria-busy");
  }
}

function fail(error) {
  clear();
  $("error").textContent = error.message;
  browse();
}

function clear() {
  $("results").hidden = $("picture").hidden = $("asked").hidden = true;
  $("results").replaceChildren();
  $("status").textContent = "";
  $("gallery").hidden = $("hint").hidden = false;
}

// ------------------------------------------------------------------ drawing

let shown = null; // the address of the uploaded picture that is shown, which must be given back

function draw(answer, file, run, moved, text) {
  if (shown) URL.revokeObjectURL(shown);
  shown = file ? URL.createObjectURL(file) : null;
  const chosen = answer.query;
  if (file || chosen) $("picture").src = shown || thumbnail(run, chosen.id);
  $("picture").alt = file ? "the image that you gave" : chosen ? `the image that you chose: ${named(chosen)}` : "";
  $("asked").textContent = file ? file.name || "pasted image" : chosen ? named(chosen) : `“${text}”`;
  $("asked").title = chosen ? chosen.path : "";
  $("asked").hidden = false;
  $("picture").hidden = !file && !chosen;
  $("gallery").hidden = $("hint").hidden = true;
  const sides = document.createElement("div");
  sides.className = answer.runs.length > 1 ? "sides two" : "sides";
  sides.append(...answer.runs.map((found, place) => side(found, place, answer)));
  $("results").replaceChildren(sides);
  $("results").hidden = false;
  const first = answer.runs[0].results[0];
  const count = plural(answer.runs[0].results.length, "image", "images");
  $("status").textContent = first
    ? `${count}, nearest first; the nearest is ${named(first)}, similarity ${minus(first.similarity)}. Choose one to see more like it.`
    : "Nothing found.";
  if (moved) {
    $("results").focus({ preventScroll: true });
    scrollTo({ top: 0 });
  }
}

function side(found, place, answer) {
  const part = document.createElement("div"), head = document.createElement("div"), heading = document.createElement("h2");
  head.className = "head";
  heading.textContent = answer.runs.length > 1 ? found.name : "Nearest images";
  head.append(heading);
  const told = summary(found, place, answer);
  if (told) head.append(Object.assign(document.createElement("small"), { textContent: told }));
  part.append(head);
  if (!found.results.length) {
    const why = found.known ? `No image${label() || where() ? " that meets the conditions" : ""} found.` : "This run’s index does not hold that image.";
    part.append(Object.assign(document.createElement("p"), { className: "nothing", textContent: why }));
    return part;
  }
  const list = document.createElement("ol");
  list.className = "grid";
  const wanted = answer.query && answer.query.label;
  list.append(...found.results.map((image, rank) => card(image, place, rank + 1, wanted && image.label === wanted)));
  part.append(list);
  return part;
}

function summary(found, place, answer) {
  const told = [];
  if (answer.query && answer.query.label && !label() && found.results.length) {
    told.push(`${found.results.filter((image) => image.label === answer.query.label).length} of ${found.results.length} with the same label`);
  }
  if (answer.runs.length > 1) {
    const others = new Set(answer.runs[1 - place].results.map((image) => image.path));
    told.push(`${found.results.filter((image) => others.has(image.path)).length} also found by the other`);
  }
  return told.join(" · ");
}

function card(image, run, rank, same) {
  const item = $("card").content.cloneNode(true).firstElementChild, button = item.firstElementChild;
  button.querySelector("img").src = thumbnail(run, image.id);
  button.querySelector("small").textContent = named(image);
  button.title = [image.path, ...Object.entries(image.data).map(([name, value]) => `${name}: ${value}`)].join("\n");
  let told = `more like this: ${named(image)}`;
  if (rank) {
    button.querySelector("b").textContent = minus(image.similarity);
    told = `rank ${rank}, ${named(image)}, similarity ${minus(image.similarity)}${same ? ", the same label" : ""}; more like this`;
    item.classList.toggle("same", Boolean(same));
  }
  button.setAttribute("aria-label", told);
  button.addEventListener("click", () => go({ ...NOTHING, like: image.id, run }));
  return item;
}

async function browse() {
  const number = latest;
  try {
    const page = await call(`/api/images?${query({ offset, limit: MOST, label: label(), filter: filter() })}`);
    if (number !== latest) return;
    $("images").replaceChildren(...page.images.map((image) => card(image, 0, 0, false)));
    $("others").hidden = page.total <= MOST;
    if (!page.total) $("status").textContent = "No image meets the conditions.";
  } catch (error) {
    $("error").textContent = error.message;
  }
}

// ------------------------------------------------------------------ listening

$("file").addEventListener("change", () => {
  const [file] = $("file").files;
  if (file) ask(file);
  $("file").value = ""; // the same file may be chosen again
});
addEventListener("paste", (event) => {
  const [file] = event.clipboardData.files;
  if (!file) return;
  event.preventDefault();
  ask(file);
});
addEventListener("dragover", (event) => {
  event.preventDefault();
  document.body.classList.add("dropping");
});
addEventListener("dragleave", (event) => { if (!event.relatedTarget) document.body.classList.remove("dropping"); });
addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("dropping");
  const [file] = event.dataTransfer.files;
  if (file) ask(file);
});
$("ask").addEventListener("submit", (event) => event.preventDefault());
$("text").addEventListener("keydown", (event) => {
  const text = $("text").value.trim();
  if (event.key === "Enter" && text) go({ ...NOTHING, text });
});
$("others").addEventListener("click", () => { offset += MOST; browse(); });
$("home").addEventListener("click", (event) => {
  event.preventDefault();
  $("label").value = $("where").value = "";
  $("any").hidden = true;
  go(NOTHING);
});

let suggesting = 0;
async function suggest() {
  const turn = ++suggesting;
  const found = await call(`/api/labels?${query({ contains: label() })}`).catch(() => ({ labels: [] }));
  if (turn !== suggesting) return;  // a later question has been asked: its answer may be there already
  $("labels").replaceChildren(...found.labels.map((each) => Object.assign(document.createElement("option"), { value: each.label })));
}
function refilter() {
  $("any").hidden = !label();
  offset = 0;
  history.replaceState(state(), "", address(state()));
  show();
}
$("label").addEventListener("input", suggest);
$("label").addEventListener("focus", suggest, { once: true });
$("label").addEventListener("change", refilter);
$("where").addEventListener("change", refilter);
$("any").addEventListener("click", () => { $("label").value = ""; $("label").focus(); refilter(); });
addEventListener("popstate", () => { readAddress(); show(); });

function readAddress() {
  const given = new URLSearchParams(location.search), like = given.get("like");
  $("label").value = given.get("label") || "";
  $("where").value = given.get("where") || "";
  $("any").hidden = !label();
  if (!history.state) {
    const known = like !== null && /^\d+$/.test(like);
    history.replaceState({ like: known ? Number(like) : null, run: given.get("run") === "1" ? 1 : 0, upload: null, text: given.get("text") }, "");
  }
}

async function start() {
  readAddress();
  // a file that was asked with is gone once the page is loaded anew
  if (state().upload !== null && !uploads[state().upload]) history.replaceState(NOTHING, "", address(NOTHING));
  try {
    about = await call("/api/about");
    const [first] = about.runs, dims = about.runs.map((run) => run.name).join(" and ");
    const columns = first.columns.filter((name) => about.runs.every((run) => run.columns.includes(name)));
    $("words").hidden = !about.runs.every((run) => run.reads_text);
    $("conditions").hidden = !columns.length;
    $("where").placeholder = columns.length ? `${columns[0]}<=20` : "";
    $("where").title = `Columns: ${columns.join(", ")}. Join conditions by “and”.`;
    $("drop").hidden = !about.runs.every((run) => run.reads_images);
    $("about").textContent = `${plural(first.images, "image", "images")} · ${dims}`;
  } catch (error) {
    $("error").textContent = error.message;
    return;
  }
  show();
}

start();
