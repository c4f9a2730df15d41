// Shows the values under the pointer in the legend of a chart. Without JavaScript the legend keeps its initial values.
for (const chart of document.querySelectorAll("svg[data-lines]")) {
  const lines = JSON.parse(chart.dataset.lines);
  const hair = chart.querySelector(".hair");
  const values = [...chart.parentElement.querySelectorAll(".legend b")];
  const at = chart.parentElement.querySelector(".at");
  const resting = [at.textContent, ...values.map((value) => value.textContent)];

  const show = (event) => {
    const box = chart.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * chart.viewBox.baseVal.width;
    const nearest = lines.map((points) => points.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a)));
    if (!nearest.length) return;
    const closest = nearest.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a));
    hair.setAttribute("x1", closest[0]);
    hair.setAttribute("x2", closest[0]);
    hair.style.visibility = "visible";
    at.textContent = closest[1];
    nearest.forEach((point, i) => (values[i].textContent = point[2]));
  };
  const rest = () => {
    hair.style.visibility = "";
    at.textContent = resting[0];
    values.forEach((value, i) => (value.textContent = resting[i + 1]));
  };
  chart.addEventListener("pointermove", show);
  chart.addEventListener("pointerdown", show);
  chart.addEventListener("pointerleave", rest);
}
