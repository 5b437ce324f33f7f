// Draws the chosen chart of each section that is not folded, in the colours of the reader's theme. A narrow screen folds all.
const { charts, themes } = JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const narrow = matchMedia("(max-width: 700px)");
const views = new Map();

function chosen(place) {
  const boxes = place.closest(".section").querySelectorAll(".names input:checked");
  return Array.from(boxes, (box) => box.value);
}

// On a narrow screen names beside the lines would take half of it; the list under the chart has the colours.
function fitted(spec) {
  const copy = structuredClone(spec);
  if (narrow.matches) copy.layer = copy.layer.filter((layer) => layer.name !== "labels");
  return copy;
}

async function draw(place) {
  if (place.closest("details.section:not([open])")) return;
  const theme = structuredClone(dark.matches ? themes.dark : themes.light);
  if (narrow.matches) theme.axis.labelLimit = 120;
  const embedded = await vegaEmbed(place, fitted(charts[place.dataset.chart]), {
    mode: "vega-lite",
    config: theme,
    renderer: "svg",
    tooltip: { theme: dark.matches ? "dark" : "light" },
    actions: { export: true, source: false, compiled: false, editor: false },
  });
  views.get(place)?.finalize();
  views.set(place, embedded.view);
  await choose(place);
}

async function choose(place) {
  const view = views.get(place);
  if (!view || !("shown" in view.getState().signals)) return;
  const names = chosen(place);
  const { rows, row_px: height } = charts[place.dataset.chart].usermeta;
  if (rows) view.height(height * Math.max(1, rows.filter((name) => names.includes(name)).length));
  await view.signal("shown", names).runAsync();
}

async function drawAll() {
  for (const place of document.querySelectorAll(".chart")) await draw(place);
  document.documentElement.dataset.drawn = document.querySelectorAll(".chart svg.marks").length;
}

function drawn(element) {
  return element.closest(".section").querySelector(".chart");
}

for (const box of document.querySelectorAll(".names input")) {
  box.addEventListener("change", () => choose(drawn(box)));
}
for (const select of document.querySelectorAll("figure select")) {
  select.addEventListener("change", () => {
    const place = drawn(select);
    const { question, about } = charts[select.value].usermeta;
    place.parentElement.querySelector("h3").textContent = question;
    place.parentElement.querySelector("figcaption p").textContent = about;
    place.dataset.chart = select.value;
    draw(place);
  });
}
for (const folded of document.querySelectorAll("details.section")) {
  folded.addEventListener("toggle", () => folded.querySelectorAll(".chart").forEach(draw));
}
// From a cell of the first table to the chart of its shape.
for (const link of document.querySelectorAll("a[data-shape]")) {
  link.addEventListener("click", () => {
    const select = document.querySelector(link.hash).querySelector("select");
    const option = Array.from(select?.options ?? []).find((one) => one.dataset.shape === link.dataset.shape);
    if (!option) return;
    select.value = option.value;
    select.dispatchEvent(new Event("change"));
  });
}
function unfold() {
  const target = document.getElementById(location.hash.slice(1));
  if (target?.matches("details")) target.open = true;
}
addEventListener("hashchange", unfold);
if (narrow.matches) {
  for (const section of document.querySelectorAll("details.section[open]")) section.open = false;
}
unfold();
dark.addEventListener("change", drawAll);
narrow.addEventListener("change", drawAll);
drawAll();
